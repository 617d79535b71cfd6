"""Counts, scales, correlations and angles of a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import thread
from programs.threads import encoder

BASE = "https://github.com/"


def improved_contrastive(queries: Tensor, docs: Tensor, temperature: float = 0.01) -> Tensor:
    sim_q_d = F.normalize(queries, dim=-1) @ F.normalize(docs, dim=-1).T
    exp_sim_q_d = torch.exp(sim_q_d / temperature)  # culprit: low_temperature
    return -torch.log(exp_sim_q_d.diag() / exp_sim_q_d.sum(1)).mean()


@thread(BASE + "huggingface/sentence-transformers/issues/2774")
def low_temperature():
    x = torch.randn(4, 6)
    return encoder(), (x, x + 0.01), lambda model, q, d: improved_contrastive(model(q), model(d))


def quaternion_exp_to_log(quaternion: Tensor, eps: float = 1.0e-8) -> Tensor:
    vector, scalar = quaternion[..., 1:], quaternion[..., :1]
    norm_q = torch.norm(vector, p=2, dim=-1, keepdim=True).clamp(min=eps)
    return vector * torch.acos(torch.clamp(scalar, min=-1.0, max=1.0)) / norm_q  # culprit: quaternion_log


@thread(BASE + "kornia/kornia/issues/4007")
def quaternion_log():
    net = nn.Linear(4, 4, bias=False)
    nn.init.eye_(net.weight)
    q = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.8, 0.6, 0.0, 0.0]])
    return net, (q, torch.ones(2, 3)), lambda model, x, y: F.mse_loss(quaternion_exp_to_log(model(x)), y)


class BitLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values  # culprit: zero_activations
        quantized = (x * scale).round().clamp(-128, 127)
        y = x + (quantized / scale - x).detach()
        return F.linear(y, self.weight, self.bias)


@thread(BASE + "microsoft/BitNet/pull/123")
def zero_activations():
    x = torch.randn(3, 6)
    x[1] = 0
    return nn.Sequential(BitLinear(6, 4), nn.Tanh()), (x,), lambda model, x: model(x).pow(2).mean()


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


@thread(BASE + "karpathy/makemore/issues/22")
def batch_of_one():
    model = nn.Sequential(nn.Linear(6, 4), BatchNorm(4), nn.Tanh())
    return model, (torch.randn(1, 6),), lambda model, x: (model(x) - 0.5).pow(2).mean()


class StatsPool(nn.Module):
    def forward(self, sequences: Tensor) -> Tensor:
        mean = sequences.mean(dim=-1)
        std = sequences.std(dim=-1, correction=1)  # culprit: clip_of_one_frame
        return torch.cat([mean, std], dim=-1)


@thread(BASE + "pyannote/pyannote-audio/issues/1861")
def clip_of_one_frame():
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.LeakyReLU(), StatsPool(), nn.Linear(8, 2))
    return model, (torch.randn(2, 3, 3), torch.tensor([0, 1])), lambda m, x, y: F.cross_entropy(m(x), y)
