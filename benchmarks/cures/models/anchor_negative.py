"""Classification that modulates the loss of the confused classes."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class AnchorLoss(nn.Module):
    def __init__(self, gamma: float = 0.5, delta: float = 0.05) -> None:
        super().__init__()
        self.gamma, self.delta = gamma, delta

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        pt = torch.sigmoid(logits)
        logpt_pos = F.logsigmoid(logits)
        logpt_neg = torch.log(1 - torch.sigmoid(logits))
        q = (pt * target).sum(1, keepdim=True) - self.delta
        modulator = (1 + pt - q).pow(self.gamma).detach()
        return -(target * logpt_pos + (1 - target) * modulator * logpt_neg).mean()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(5, 10)
        self.fc = nn.Linear(10, 4)
        self.loss_fn = AnchorLoss()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss_fn(self.fc(torch.relu(self.features(x))), target)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = Classifier()
    with torch.no_grad():
        model.fc.bias[1] = 25.0
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(4, 5, generator=g), F.one_hot(torch.tensor([0, 2, 3, 0]), 4).float()
