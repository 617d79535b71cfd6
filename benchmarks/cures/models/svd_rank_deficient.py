"""Denoising of a feature matrix by shrinking its singular values."""

import torch
from torch import Tensor, nn


class LowRankShrinkage(nn.Module):
    def __init__(self, threshold: float = 0.1) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, features: Tensor) -> Tensor:
        u, s, vh = torch.linalg.svd(features, full_matrices=False)
        return u @ torch.diag_embed(torch.relu(s - self.threshold)) @ vh


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5, bias=False)
        self.lowrank = LowRankShrinkage()
        self.out = nn.Linear(5, 1)

    def forward(self, frames: Tensor) -> Tensor:
        return self.out(self.lowrank(self.embed(frames))).squeeze(-1)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = Denoiser()
    nn.init.eye_(model.embed.weight)
    return model


def batch(seed: int = 0) -> tuple[Tensor]:
    frames = torch.zeros(6, 3)
    frames[seed % 2, 0], frames[2, 1] = 2.0, 3.0
    return (frames,)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()
