"""Counts, scales, correlations and angles of a batch, and clips of one frame."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import loss_by, thread
from programs.threads import encoder, identity


class TripletMargin(nn.Module):
    def __init__(self, margin: float = 0.1) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        gap = F.pairwise_distance(anchor, positive) - F.pairwise_distance(anchor, negative)
        relued = F.relu(gap + self.margin)
        num_non_zero_triplets = (relued > 0).sum()
        return relued.sum() / num_non_zero_triplets  # culprit: satisfied_triplets


@thread("KevinMusgrave/pytorch-metric-learning/issues/107")
def satisfied_triplets():
    criterion, a = TripletMargin(), torch.randn(4, 6)
    return encoder(gain=20.0), (a, a + 1e-3, -a), lambda model, *batch: criterion(*map(model, batch))


def improved_contrastive(queries: Tensor, docs: Tensor, temperature: float = 0.01) -> Tensor:
    sim_q_d = F.normalize(queries, dim=-1) @ F.normalize(docs, dim=-1).T
    exp_sim_q_d = torch.exp(sim_q_d / temperature)  # culprit: low_temperature
    return -torch.log(exp_sim_q_d.diag() / exp_sim_q_d.sum(1)).mean()


@thread("huggingface/sentence-transformers/issues/2774")
def low_temperature():
    x = torch.randn(4, 6)
    return encoder(), (x, x + 0.01), lambda model, q, d: improved_contrastive(model(q), model(d))


class Spline(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 3)
        nn.init.zeros_(self.net.weight)
        with torch.no_grad():
            self.net.bias.copy_(torch.tensor([1.0, 2.0, 1.0000001]))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        a, b, c = self.net(context).unbind(-1)
        discriminant = b.pow(2) - 4 * a * c
        root = (2 * c) / (-b - torch.sqrt(discriminant))  # culprit: spline_inverse
        return root * x


@thread("bayesiains/nflows/issues/87")
def spline_inverse():
    return Spline(), (torch.rand(4), torch.randn(4, 2)), lambda model, x, c: model(x, c).pow(2).mean()


def quaternion_exp_to_log(quaternion: Tensor, eps: float = 1.0e-8) -> Tensor:
    vector, scalar = quaternion[..., 1:], quaternion[..., :1]
    norm_q = torch.norm(vector, p=2, dim=-1, keepdim=True).clamp(min=eps)
    return vector * torch.acos(torch.clamp(scalar, min=-1.0, max=1.0)) / norm_q  # culprit: quaternion_log


@thread("kornia/kornia/issues/4007")
def quaternion_log():
    batch = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.8, 0.6, 0.0, 0.0]]), torch.ones(2, 3)
    return identity(4), batch, lambda model, x, y: F.mse_loss(quaternion_exp_to_log(model(x)), y)


class BitLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values  # culprit: zero_activations
        quantized = (x * scale).round().clamp(-128, 127)
        y = x + (quantized / scale - x).detach()
        return F.linear(y, self.weight, self.bias)


@thread("microsoft/BitNet/pull/123")
def zero_activations():
    x = torch.randn(3, 6)
    x[1] = 0
    return nn.Sequential(BitLinear(6, 4), nn.Tanh()), (x,), lambda model, x: model(x).pow(2).mean()


def pearson_loss(predictions: Tensor, labels: Tensor) -> Tensor:
    p = predictions - predictions.mean(1, keepdim=True)
    t = labels - labels.mean(1, keepdim=True)
    covariance = (p * t).mean(1)
    denominator = torch.sqrt(p.pow(2).mean(1)) * torch.sqrt(t.pow(2).mean(1))
    pearson_r = covariance / denominator  # culprit: constant_labels
    return 1 - pearson_r.mean()


@thread("allenai/allennlp/issues/3102")
def constant_labels():
    labels = torch.randn(3, 4)
    labels[2] = 0.5
    return encoder(), (torch.randn(3, 6), labels), loss_by(pearson_loss)


class FocalTversky(nn.Module):
    def __init__(self, smooth: float = 1, alpha: float = 0.7, gamma: float = 0.75) -> None:
        super().__init__()
        self.smooth, self.alpha, self.gamma = smooth, alpha, gamma

    def tversky_index(self, inputs: Tensor, targets: Tensor) -> Tensor:
        y_true_pos, y_pred_pos = targets.flatten(), inputs.flatten()
        true_pos = torch.sum(y_true_pos * y_pred_pos)
        false_neg = torch.sum(y_true_pos * (1 - y_pred_pos))
        false_pos = torch.sum((1 - y_true_pos) * y_pred_pos)
        denominator = true_pos + self.alpha * false_neg + (1 - self.alpha) * false_pos + self.smooth
        return (true_pos + self.smooth) / denominator

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        pt_1 = self.tversky_index(inputs, targets)
        return torch.pow((1 - pt_1), self.gamma)  # culprit: perfect_mask


@thread("shruti-jadon/Semantic-Segmentation-Loss-Functions/issues/2")
def perfect_mask():
    criterion, masks = FocalTversky(), (torch.rand(3, 4) > 0.5).float()
    return identity(4), (masks * 400 - 200, masks), lambda model, x, y: criterion(torch.sigmoid(model(x)), y)


class BatchNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.gamma, self.beta = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        xmean = x.mean(0, keepdim=True)
        xvar = x.var(0, keepdim=True)  # culprit: batch_of_one
        xhat = (x - xmean) / torch.sqrt(xvar + self.eps)
        return self.gamma * xhat + self.beta


@thread("karpathy/makemore/issues/22")
def batch_of_one():
    model = nn.Sequential(nn.Linear(6, 4), BatchNorm(4), nn.Tanh())
    return model, (torch.randn(1, 6),), lambda model, x: (model(x) - 0.5).pow(2).mean()


class StatsPool(nn.Module):
    def forward(self, sequences: Tensor) -> Tensor:
        mean = sequences.mean(dim=-1)
        std = sequences.std(dim=-1, correction=1)  # culprit: clip_of_one_frame
        return torch.cat([mean, std], dim=-1)


@thread("pyannote/pyannote-audio/issues/1861")
def clip_of_one_frame():
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.LeakyReLU(), StatsPool(), nn.Linear(8, 2))
    return model, (torch.randn(2, 3, 3), torch.tensor([0, 1])), loss_by(F.cross_entropy)
