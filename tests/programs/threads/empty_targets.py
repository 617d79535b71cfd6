"""Targets without a foreground, silence, and clips of one frame."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import thread

BASE = "https://github.com/"


class StatsPool(nn.Module):
    def forward(self, sequences: Tensor) -> Tensor:
        mean = sequences.mean(dim=-1)
        std = sequences.std(dim=-1, correction=1)  # culprit: clip_of_one_frame
        return torch.cat([mean, std], dim=-1)


@thread(BASE + "pyannote/pyannote-audio/issues/1861")
def clip_of_one_frame():
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.LeakyReLU(), StatsPool(), nn.Linear(8, 2))
    return model, (torch.randn(2, 3, 3), torch.tensor([0, 1])), lambda m, x, y: F.cross_entropy(m(x), y)
