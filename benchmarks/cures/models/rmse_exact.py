"""House prices with the root mean squared error of the competition."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSELoss(nn.Module):
    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        return torch.sqrt(F.mse_loss(pred, target))


class PriceModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(7, 8), nn.ReLU())
        self.price = nn.Linear(8, 1)
        self.criterion = RMSELoss()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.criterion(self.price(self.trunk(x)).squeeze(-1), target)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = PriceModel()
    nn.init.zeros_(model.price.weight)
    nn.init.zeros_(model.price.bias)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(4, 7, generator=g), torch.zeros(4)


def loss(output: Tensor) -> Tensor:
    return output
