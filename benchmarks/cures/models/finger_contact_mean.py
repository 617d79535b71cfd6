"""Motion synthesis with a contact term between fingers and object."""

import torch
from torch import Tensor, nn


class FingerContact(nn.Module):
    def __init__(self, threshold: float = 0.02) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, fingers: Tensor, surface: Tensor) -> Tensor:
        distance = (fingers - surface).abs().sum(-1)
        flag = distance < self.threshold
        return distance[flag].mean()


class MotionDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 10, batch_first=True)
        self.fingers = nn.Linear(10, 3)
        self.contact = FingerContact()

    def forward(self, condition: Tensor, surface: Tensor) -> Tensor:
        h, _ = self.rnn(condition)
        return self.contact(self.fingers(h), surface)


def make() -> nn.Module:
    torch.manual_seed(0)
    return MotionDecoder()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, 8, 6, generator=g), torch.full((2, 8, 3), 5.0)
