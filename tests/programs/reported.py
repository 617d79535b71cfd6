"""Models rebuilt from public reports that fail in the forward, in the backward or in a loss. Their code is our own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.case import Setup, failure, sequence


class MemoryCompressedAttention(nn.Module):
    def __init__(self, width: int, factor: int = 2) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(width, 3 * width)
        self.compress = nn.Conv1d(width, width, factor, stride=factor)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        k, v = (self.compress(t.transpose(1, 2)).transpose(1, 2) for t in (k, v))
        dots = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        steps = torch.arange(q.shape[1])[:, None]
        mask = steps < torch.arange(k.shape[1])[None] * self.factor
        dots = dots.masked_fill(mask, -float("-inf"))  # culprit: causal_sign
        return torch.softmax(dots, dim=-1) @ v


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = MemoryCompressedAttention(width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.attn(self.norm(x)))


@failure(module="attn", label="", operations="masked_fill")
def causal_sign() -> Setup:
    """Causal attention with compressed keys and values (lucidrains/memory-compressed-attention/issues/2)."""
    model = Block()
    g = torch.Generator().manual_seed(0)
    return Setup(model, (torch.randn(2, 8, 8, generator=g),), loss=lambda output: output.sum())


class ValidMSE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.MSELoss(reduction="none")

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        valid = torch.logical_not(torch.isnan(target))
        return self.criterion(pred, target)[valid].sum()  # culprit: mse_missing_targets


class AssayModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fingerprint = nn.Linear(16, 8)
        self.assays = nn.Linear(8, 4)
        self.objective = ValidMSE()

    def forward(self, bits: Tensor, target: Tensor) -> Tensor:
        return self.objective(self.assays(torch.relu(self.fingerprint(bits))), target)


@failure(module="objective.criterion", label="", operations="mse_loss")
def mse_missing_targets() -> Setup:
    """Assay prediction: every molecule lacks most of the targets (pytorch/pytorch/issues/121416)."""
    model = AssayModel()
    g = torch.Generator().manual_seed(0)
    target = torch.randn(5, 4, generator=g)
    target[torch.rand(5, 4, generator=g) > 0.5] = float("nan")
    target[0], target[1, 0] = 1.0, float("nan")
    bits = (torch.rand(5, 16, generator=g) > 0.5).float()
    return Setup(model, (bits, target), loss=lambda output: output)


class Companding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, torch.sqrt(x), x)  # culprit: where_sqrt_negative


class WaveNetBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.analysis = nn.Conv1d(1, 4, 3, padding=1)
        self.companding = Companding()
        self.synthesis = nn.Conv1d(4, 1, 3, padding=1)

    def forward(self, wave: Tensor) -> Tensor:
        return self.synthesis(self.companding(self.analysis(wave)))


@failure(module="companding", label="", operations="sqrt")
def where_sqrt_negative() -> Setup:
    """Audio with a companding nonlinearity between two convolutions (tensorflow/tensorflow/pull/38467)."""
    model = WaveNetBlock()
    g = torch.Generator().manual_seed(0)
    return Setup(model, (torch.randn(2, 1, 20, generator=g),), loss=lambda output: output.square().mean())


LOSS_SCALE = 512.0


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.neck = nn.Linear(16, 16)
        self.reg = nn.Linear(16, 4)

    def forward(self, features: Tensor) -> Tensor:
        return self.reg(torch.relu(self.neck(features)))  # culprit: static_loss_scale


@failure(module="reg", label="", operations="addmm")
def static_loss_scale() -> Setup:
    """Half-precision training with a fixed loss scale (open-mmlab/mmdetection/issues/3690)."""
    model = Regressor().half()
    g = torch.Generator().manual_seed(0)
    features = (120 * torch.randn(32, 16, generator=g)).half()
    return Setup(model, (features,), loss=lambda output: output.float().square().sum(1).mean() * LOSS_SCALE)


class StemMask(nn.Module):
    def __init__(self, stems: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, stems, 1)

    def forward(self, magnitude: Tensor) -> Tensor:
        return torch.sigmoid(self.conv(magnitude[:, None])) * magnitude[:, None]


def spectral_rmse_loss(output: Tensor) -> Tensor:
    error = output - 0.3 * output.detach().sum(1, keepdim=True)
    rmse = torch.sqrt(error.abs().square().mean((-2, -1)))  # culprit: spectral_rmse
    return rmse.mean()


@failure(module="-", label="", operations="sqrt")
def spectral_rmse() -> Setup:
    """Source separation of stems, by a function of the script (ZFTurbo/Music-Source-Separation-Training/pull/200)."""
    model = sequence(mask=StemMask())
    g = torch.Generator().manual_seed(0)
    magnitude = torch.rand(3, 6, 5, generator=g)
    magnitude[1] = 0.0
    return Setup(model, (magnitude,), loss=spectral_rmse_loss)  # a method of the loop makes the call
