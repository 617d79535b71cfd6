"""Losses of classes, masks and boxes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import thread
from programs.threads import encoder

BASE = "https://github.com/"


class FocalLoss(nn.Module):
    def __init__(self, gamma: float = 2.0, eps: float = 1e-8) -> None:
        super().__init__()
        self.gamma, self.eps = gamma, eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        y_pred = torch.clamp(y_pred, self.eps, 1 - self.eps)
        positive = y_true * torch.pow(1 - y_pred, self.gamma) * torch.log(y_pred)
        weight = (1 - y_true) * torch.pow(y_pred, self.gamma)
        negative = weight * torch.log(1 - y_pred)  # culprit: focal_clamped
        return -(positive + negative).sum(1).mean()


@thread(BASE + "NVIDIA/apex/issues/358")
def focal_clamped():
    criterion = FocalLoss()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return criterion(torch.sigmoid(model(x)), y)

    return encoder(gain=90.0), (torch.randn(4, 6), torch.ones(4, 4)), loss


class Pointer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 1)
        self.generate, self.copy = nn.Linear(6, 5), nn.Linear(6, 5)
        nn.init.constant_(self.gate.bias, 40.0)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        generated = F.log_softmax(self.generate(x), -1) + gate.log()
        copied = F.log_softmax(self.copy(x), -1) + (1 - gate).log()  # culprit: pointer_network
        return torch.logaddexp(generated, copied)


@thread(BASE + "yym6472/ms_pointer_network/issues/1")
def pointer_network():
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(model(x), y) + model(x).pow(2).mean()

    return Pointer(), (torch.randn(3, 6), torch.tensor([0, 1, 2])), loss


@thread(BASE + "MakazhanAlpamys/Soup/issues/719")
def reverse_divergence():
    def loss(model: nn.Module, x: Tensor, teacher: Tensor) -> Tensor:
        student = F.softmax(model(x) / 0.05, dim=-1)
        log_teacher = F.log_softmax(teacher, dim=-1)
        return (student * (student.log() - log_teacher)).sum(-1).mean()  # culprit: reverse_divergence

    return encoder(gain=60.0), (torch.randn(3, 6), torch.randn(3, 4)), loss
