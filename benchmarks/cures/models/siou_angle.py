"""A detection head with the SIoU box loss, whose angle cost divides by the distance of two centres."""

import torch
from torch import Tensor, nn


class SIoULoss(nn.Module):
    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        apart = (target[:, :2] - pred[:, :2]).abs()
        sigma = torch.pow(apart[:, 0] ** 2 + apart[:, 1] ** 2, 0.5)
        sine = apart[:, 0] / sigma
        other = apart[:, 1] / sigma
        sine = torch.where(sine > 2**-0.5, other, sine)
        angle = 1 - 2 * torch.sin(torch.asin(sine) - torch.pi / 4) ** 2
        gap = (pred[:, 2:] / target[:, 2:]).log().abs().sum(-1)
        return (gap + (angle - 2).mul(sigma).exp()).mean()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reg = nn.Linear(6, 4)
        self.loss_box = SIoULoss()

    def forward(self, features: Tensor, anchors: Tensor, targets: Tensor) -> Tensor:
        raw = self.reg(features)
        boxes = torch.cat([anchors + raw[:, :2], raw[:, 2:].exp()], -1)
        return self.loss_box(boxes, targets)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = Head()
    nn.init.zeros_(model.reg.bias)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    features, anchors = torch.randn(5, 6, generator=g), torch.rand(5, 2, generator=g) * 10
    features[2] = 0.0  # a box that is predicted at its target's centre
    return features, anchors, torch.cat([anchors, torch.rand(5, 2, generator=g) + 1], -1)
