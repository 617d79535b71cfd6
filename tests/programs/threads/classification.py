"""Losses of classes, masks and boxes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import loss_by, thread
from programs.threads import encoder, zero_head


@thread("summerlvsong/Aggregation-Cross-Entropy/issues/2")
def aggregation_cross_entropy():
    def loss(model: nn.Module, x: Tensor, counts: Tensor) -> Tensor:
        probs = torch.softmax(model(x), -1).mean(1)
        return -(torch.log(probs) * counts).sum(-1).mean()  # culprit: aggregation_cross_entropy

    counts = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0]])
    return encoder(gain=800.0), (torch.randn(2, 3, 6), counts), loss


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


@thread("NVIDIA/apex/issues/358")
def focal_clamped():
    criterion, batch = FocalLoss(), (torch.randn(4, 6), torch.ones(4, 4))
    return encoder(gain=90.0), batch, lambda model, x, y: criterion(torch.sigmoid(model(x)), y)


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


@thread("yym6472/ms_pointer_network/issues/1")
def pointer_network():
    batch = torch.randn(3, 6), torch.tensor([0, 1, 2])
    return Pointer(), batch, lambda model, x, y: F.nll_loss(model(x), y) + model(x).pow(2).mean()


@thread("Zhen-Dong/Magic-Me/issues/14")
def masked_region():
    def loss(model: nn.Module, x: Tensor, y: Tensor, masks: Tensor) -> Tensor:
        error = F.mse_loss(model(x), y, reduction="none") * masks
        per_sample = error.sum([1, 2, 3]) / masks.sum([1, 2, 3])  # culprit: masked_region
        return per_sample.mean()

    masks = torch.ones(2, 1, 4, 4)
    masks[1] = 0
    return nn.Conv2d(1, 1, 3, padding=1), (torch.randn(2, 1, 4, 4), torch.randn(2, 1, 4, 4), masks), loss


@thread("WongKinYiu/yolov9/pull/662")
def detector_without_targets():
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        objectness = F.binary_cross_entropy_with_logits(scores[:, 0], y.float())
        positive = y > 0
        classes = F.softplus(-scores[positive]).mean()  # culprit: detector_without_targets
        return objectness + classes

    return encoder(), (torch.randn(5, 6), torch.zeros(5, dtype=torch.long)), loss


class AspectLoss(nn.Module):
    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        w, h = pred[:, 2], pred[:, 3]
        arctan = torch.atan(target[:, 2] / target[:, 3]) - torch.atan(w / h)  # culprit: aspect_ratio
        return (4 / math.pi**2 * torch.pow(arctan, 2)).mean()


@thread("Megvii-BaseDetection/YOLOX/issues/1565")
def aspect_ratio():
    return zero_head(), (torch.randn(2, 6), torch.rand(2, 4) + 0.5), loss_by(AspectLoss())


@thread("MakazhanAlpamys/Soup/issues/719")
def reverse_divergence():
    def loss(model: nn.Module, x: Tensor, teacher: Tensor) -> Tensor:
        student = F.softmax(model(x) / 0.05, dim=-1)
        log_teacher = F.log_softmax(teacher, dim=-1)
        return (student * (student.log() - log_teacher)).sum(-1).mean()  # culprit: reverse_divergence

    return encoder(gain=60.0), (torch.randn(3, 6), torch.randn(3, 4)), loss


@thread("RasmussenLab/vamb/issues/12")
def contig_depths():
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = encoder(gain=700.0)

        def forward(self, z: Tensor) -> Tensor:
            return F.softmax(self.net(z), dim=1)

    def loss(model: nn.Module, z: Tensor, depths: Tensor) -> Tensor:
        cross_entropy = -(depths * model(z).log()).sum(dim=1)  # culprit: contig_depths
        return cross_entropy.mean()

    return Decoder(), (torch.randn(3, 6), F.one_hot(torch.tensor([0, 1, 2]), 4).float()), loss
