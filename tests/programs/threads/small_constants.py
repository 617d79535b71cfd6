"""Small constants, squared lengths and mixtures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import thread
from programs.threads import encoder

BASE = "https://github.com/"


class Distillation(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.eps = model, 1e-8

    def forward(self, queries: Tensor, documents: Tensor, labels: Tensor) -> Tensor:
        scores = torch.einsum("qd,qkd->qk", self.model(queries), self.model(documents))
        lowest = scores.min(-1, keepdim=True).values
        highest = scores.max(-1, keepdim=True).values
        scores = (scores - lowest) / (highest - lowest + self.eps)  # culprit: equal_scores
        return F.kl_div(scores.float().log_softmax(-1), labels.float(), reduction="batchmean")


@thread(BASE + "lightonai/pylate/issues/239")
def equal_scores():
    documents = torch.randn(2, 1, 6).expand(2, 4, 6).clone().half()
    batch = torch.randn(2, 6).half(), documents, torch.full((2, 4), 0.25).half()
    model = Distillation(encoder().half())
    return model, batch, lambda model, *batch: model(*batch)


class ContrastiveHead(nn.Module):
    def __init__(self, temperature: float = 0.5) -> None:
        super().__init__()
        self.projection, self.temperature = nn.Linear(6, 4, bias=False), temperature

    def forward(self, x: Tensor) -> Tensor:
        out = F.normalize(self.projection(x), dim=1)  # culprit: dead_projection
        logits = out @ out.T / self.temperature
        return F.cross_entropy(logits.float(), torch.arange(len(x)))


@thread(BASE + "lightly-ai/lightly/issues/1259")
def dead_projection():
    x = torch.randn(4, 6)
    x[2] = 0
    return ContrastiveHead().half(), (x.half(),), lambda model, x: model(x)


def binary_focal_loss(logits: Tensor, target: Tensor, alpha=0.25, gamma=0.5, eps=1e-8) -> Tensor:
    probs = torch.sigmoid(logits)
    loss = -alpha * torch.pow(1.0 - probs, gamma) * target * torch.log(probs + eps)
    negative = torch.pow(probs, gamma) * (1.0 - target)  # culprit: fractional_focus
    loss = loss - (1 - alpha) * negative * torch.log(1.0 - probs + eps)
    return loss.mean()


@thread(BASE + "kornia/kornia/issues/918")
def fractional_focus():
    target = torch.tensor([[0.0, 1.0, 0.0, 1.0]]).expand(3, 4)
    return (
        encoder(gain=900.0),
        (torch.randn(3, 6), target),
        lambda model, x, y: binary_focal_loss(model(x), y),
    )


class PointerGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.copy, self.vocabulary, self.gate = encoder(gain=900.0), encoder(gain=900.0), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.gate(x))
        mixture = p * F.softmax(self.copy(x), -1) + (1 - p) * F.softmax(self.vocabulary(x), -1)
        return torch.log(mixture)  # culprit: pointer_mixture


@thread(BASE + "pytorch/pytorch/issues/1620")
def pointer_mixture():
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(model(x), y)

    return PointerGenerator(), (torch.randn(8, 6), torch.arange(8) % 4), loss


def safe_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    scores = scores.masked_fill(mask, -torch.inf)
    weights = torch.exp(scores - scores.max(-1, keepdim=True).values)  # culprit: masked_everywhere
    return weights / weights.sum(-1, keepdim=True)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1)
        return self.out(safe_softmax(scores, padding[:, None]) @ x)


@thread(BASE + "tracel-ai/burn/pull/4697")
def masked_everywhere():
    padding = torch.tensor([[False, False, True], [True, True, True]])
    return Reader(), (torch.randn(2, 3, 6), padding), lambda model, x, p: model(x, p).square().mean()


def inner_gradient_direction(old: Tensor, new: Tensor) -> Tensor:
    step = new - old
    return step / step.norm(p=2)  # culprit: sharpness_direction


@thread(BASE + "rollovd/LookSAM/issues/1")
def sharpness_direction():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        features = model(x)
        return (features + 0.05 * inner_gradient_direction(features.detach(), features)).square().mean()

    return encoder(), (torch.randn(3, 6),), loss
