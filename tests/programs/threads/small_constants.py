"""Small constants, squared lengths and mixtures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import loss_by, thread
from programs.threads import encoder, zero_head


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


@thread("lightonai/pylate/issues/239")
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


@thread("lightly-ai/lightly/issues/1259")
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


@thread("kornia/kornia/issues/918")
def fractional_focus():
    target = torch.tensor([[0.0, 1.0, 0.0, 1.0]]).expand(3, 4)
    return encoder(gain=900.0), (torch.randn(3, 6), target), loss_by(binary_focal_loss)


def normalize_tensor(in_feat: Tensor, eps: float = 1e-10) -> Tensor:
    norm_factor = torch.sqrt(torch.sum(in_feat**2, dim=1, keepdim=True))  # culprit: perceptual_distance
    return in_feat / (norm_factor + eps)


@thread("richzhang/PerceptualSimilarity/issues/69")
def perceptual_distance():
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (normalize_tensor(model(x)) - normalize_tensor(y)).square().mean()

    return zero_head(), (torch.randn(3, 6), torch.randn(3, 4)), loss


def edge_lengths(corners: Tensor) -> Tensor:
    x1, y1, x2, y2 = corners.unbind(-1)
    num = torch.sqrt((y2 - y1).square() + (x2 - x1).square()) + 1e-8  # culprit: enclosing_box
    return (y2 * x1 - x2 * y1).abs() / num


@thread("lilanxiao/Rotated_IoU/issues/20")
def enclosing_box():
    return zero_head(), (torch.randn(3, 6),), lambda model, x: edge_lengths(model(x)).sum()


class PointerGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.copy, self.vocabulary, self.gate = encoder(gain=900.0), encoder(gain=900.0), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.gate(x))
        mixture = p * F.softmax(self.copy(x), -1) + (1 - p) * F.softmax(self.vocabulary(x), -1)
        return torch.log(mixture)  # culprit: pointer_mixture


@thread("pytorch/pytorch/issues/1620")
def pointer_mixture():
    return PointerGenerator(), (torch.randn(8, 6), torch.arange(8) % 4), loss_by(F.nll_loss)


EPS = torch.finfo(torch.float32).eps


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = encoder(gain=600.0)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self._nll_bernoulli(torch.sigmoid(self.net(z)), x)

    def _nll_bernoulli(self, theta: Tensor, x: Tensor) -> Tensor:
        empty = torch.log(1 - theta - EPS)  # culprit: saturated_pixels
        return -torch.sum(x * torch.log(theta + EPS) + (1 - x) * empty)


@thread("emited/VariationalRecurrentNeuralNetwork/issues/10")
def saturated_pixels():
    return Decoder(), (torch.randn(3, 6), torch.rand(3, 4)), lambda model, z, x: model(z, x)


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


@thread("tracel-ai/burn/pull/4697")
def masked_everywhere():
    padding = torch.tensor([[False, False, True], [True, True, True]])
    return Reader(), (torch.randn(2, 3, 6), padding), lambda model, x, p: model(x, p).square().mean()
