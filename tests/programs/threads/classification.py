"""Losses of classes, masks and boxes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import thread
from programs.threads import encoder, zero_head

BASE = "https://github.com/"


@thread(BASE + "summerlvsong/Aggregation-Cross-Entropy/issues/2")
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


@thread(BASE + "NVIDIA/apex/issues/358")
def focal_clamped():
    criterion = FocalLoss()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return criterion(torch.sigmoid(model(x)), y)

    return encoder(gain=90.0), (torch.randn(4, 6), torch.ones(4, 4)), loss


def weighted_focal(probs: Tensor, target: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    probs_neg = 1 - probs
    pos_term = -alpha * probs_neg.pow(gamma) * target * probs.log()
    neg_term = -(1 - alpha) * probs.pow(gamma) * (1.0 - target) * probs_neg.log()  # culprit: edge_classifier
    return (pos_term + neg_term).mean()


@thread(BASE + "gnn-tracking/gnn_tracking/issues/104")
def edge_classifier():
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return weighted_focal(model(x).sigmoid().squeeze(-1), y)

    return encoder(outputs=1, gain=200.0), (torch.randn(8, 6), (torch.rand(8) > 0.3).float()), loss


@thread(BASE + "thuml/MDD/issues/4")
def adversarial_margin():
    model = nn.ModuleDict({"source": encoder(), "adversary": encoder(gain=400.0)})

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        target = model["source"](x).argmax(1, keepdim=True)
        adversary = F.softmax(model["adversary"](x), dim=1)
        logloss = torch.log(1 - adversary)  # culprit: adversarial_margin
        return -logloss.gather(1, target).mean()

    return model, (torch.randn(6, 6),), loss


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


@thread(BASE + "Zhen-Dong/Magic-Me/issues/14")
def masked_region():
    def loss(model: nn.Module, x: Tensor, y: Tensor, masks: Tensor) -> Tensor:
        error = F.mse_loss(model(x), y, reduction="none") * masks
        per_sample = error.sum([1, 2, 3]) / masks.sum([1, 2, 3])  # culprit: masked_region
        return per_sample.mean()

    masks = torch.ones(2, 1, 4, 4)
    masks[1] = 0
    return nn.Conv2d(1, 1, 3, padding=1), (torch.randn(2, 1, 4, 4), torch.randn(2, 1, 4, 4), masks), loss


def masked_bce(outputs: Tensor, targets: Tensor) -> Tensor:
    mask = (targets != -1).to(outputs.dtype)
    loss = nn.BCEWithLogitsLoss(reduction="none")(outputs, targets) * mask
    return loss.sum() / mask.sum()  # culprit: unannotated_batch


@thread(BASE + "londonaicentre/FLIP/pull/766")
def unannotated_batch():
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return masked_bce(model(x), y)

    return encoder(), (torch.randn(3, 6), -torch.ones(3, 4)), loss


@thread(BASE + "york135/CTC_CE_for_AST/issues/3")
def onset_weights():
    criterion = nn.CrossEntropyLoss(reduction="none")

    def loss(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        frames = criterion(model(x), y)
        return torch.dot(frames, weight) / torch.sum(weight)  # culprit: onset_weights

    return encoder(), (torch.randn(5, 6), torch.zeros(5, dtype=torch.long), torch.zeros(5)), loss


@thread(BASE + "WongKinYiu/yolov9/pull/662")
def detector_without_targets():
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        objectness = F.binary_cross_entropy_with_logits(scores[:, 0], y.float())
        positive = y > 0
        classes = F.softplus(-scores[positive]).mean()  # culprit: detector_without_targets
        return objectness + classes

    return encoder(), (torch.randn(5, 6), torch.zeros(5, dtype=torch.long)), loss


@thread(BASE + "unslothai/unsloth-zoo/pull/1286")
def truncated_completions():
    def loss(model: nn.Module, x: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        log_probs = F.log_softmax(model(x), -1)[..., 0]
        ratio = torch.exp(log_probs - log_probs.detach())
        per_token = -ratio * advantages.unsqueeze(1)
        normalizer = mask.sum() / 2
        return (per_token * mask).sum() / normalizer  # culprit: truncated_completions

    return encoder(), (torch.randn(2, 3, 6), torch.randn(2), torch.zeros(2, 3)), loss


@thread(BASE + "microsoft/LMOps/issues/38")
def distillation_mask():
    def distill(logits: Tensor, teacher_logits: Tensor, label: Tensor) -> Tensor:
        teacher = F.softmax(teacher_logits, dim=-1)
        product = teacher * F.log_softmax(logits, dim=-1)
        mask = (label != -100).int()
        x = product.sum(-1).view(-1) * mask
        return -torch.sum(x) / torch.sum(mask)  # culprit: distillation_mask

    def loss(model: nn.Module, x: Tensor, teacher_logits: Tensor, label: Tensor) -> Tensor:
        return distill(model(x), teacher_logits, label)

    return encoder(), (torch.randn(2, 6), torch.randn(2, 4), torch.full((2,), -100)), loss


def complete_iou(pred: Tensor, target: Tensor) -> Tensor:
    top, bottom = torch.max(pred[:, :2], target[:, :2]), torch.min(pred[:, 2:], target[:, 2:])
    inter = (bottom - top).clamp(0).prod(1)
    (w, h), (wt, ht) = (pred[:, 2:] - pred[:, :2]).unbind(1), (target[:, 2:] - target[:, :2]).unbind(1)
    union = w * h + wt * ht - inter
    iou = inter / union  # culprit: empty_boxes
    ratio = 4 / math.pi**2 * (torch.atan2(wt, ht) - torch.atan2(w + 1, h + 1)) ** 2
    return (1 - iou + ratio).mean()


class BoxHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.corner, self.size = nn.Linear(6, 2), zero_head(outputs=2)

    def forward(self, x: Tensor) -> Tensor:
        corner = self.corner(x)
        return torch.cat([corner, corner + self.size(x)], 1)


@thread(BASE + "WongKinYiu/ScaledYOLOv4/issues/145")
def empty_boxes():
    def loss(model: nn.Module, x: Tensor, boxes: Tensor) -> Tensor:
        return complete_iou(model(x), boxes)

    boxes = torch.tensor([[0.1, 0.2, 0.5, 0.6], [0.4, 0.4, 0.4, 0.4]])
    return BoxHead(), (torch.randn(2, 6), boxes), loss


class AspectLoss(nn.Module):
    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        w, h = pred[:, 2], pred[:, 3]
        arctan = torch.atan(target[:, 2] / target[:, 3]) - torch.atan(w / h)  # culprit: aspect_ratio
        return (4 / math.pi**2 * torch.pow(arctan, 2)).mean()


@thread(BASE + "Megvii-BaseDetection/YOLOX/issues/1565")
def aspect_ratio():
    criterion = AspectLoss()

    def loss(model: nn.Module, x: Tensor, boxes: Tensor) -> Tensor:
        return criterion(model(x), boxes)

    return zero_head(), (torch.randn(2, 6), torch.rand(2, 4) + 0.5), loss


@thread(BASE + "MakazhanAlpamys/Soup/issues/719")
def reverse_divergence():
    def loss(model: nn.Module, x: Tensor, teacher: Tensor) -> Tensor:
        student = F.softmax(model(x) / 0.05, dim=-1)
        log_teacher = F.log_softmax(teacher, dim=-1)
        return (student * (student.log() - log_teacher)).sum(-1).mean()  # culprit: reverse_divergence

    return encoder(gain=60.0), (torch.randn(3, 6), torch.randn(3, 4)), loss


@thread(BASE + "RasmussenLab/vamb/issues/12")
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
