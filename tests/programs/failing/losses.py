"""Losses and likelihoods written by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.case import Setup, failure, sequence


class Scored(nn.Module):
    """A linear layer and a loss on what it gives."""

    def __init__(self, width: int, outputs: int, loss: nn.Module) -> None:
        super().__init__()
        self.head = nn.Linear(width, outputs)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.head(x), target)


class ExponentialLoss(nn.Module):
    """The loss of AdaBoost."""

    def forward(self, score: Tensor, target: Tensor) -> Tensor:
        margin = score.squeeze(-1) * target
        return torch.exp(-margin).mean()  # culprit: exponential_loss


@failure("exp of a large margin in a loss of one's own", module="loss", value="inf", operations="exp")
def exponential_loss() -> Setup:
    model = Scored(8, 1, ExponentialLoss())
    x, target = torch.randn(64, 8) * 500, torch.randint(0, 2, (64,)) * 2.0 - 1
    return Setup(model, (x, target))


class BinaryCrossEntropy(nn.Module):
    """-y log(p) - (1 - y) log(1 - p)."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        p = torch.sigmoid(logits.squeeze(-1))
        positive = target * torch.log(p)
        negative = (1 - target) * torch.log(1 - p)  # culprit: binary_cross_entropy
        return -(positive + negative).mean()


@failure("binary cross entropy by hand of a probability of 1: 0 × log(0)", module="loss", operations="log")
def binary_cross_entropy() -> Setup:
    model = Scored(8, 1, BinaryCrossEntropy())
    nn.init.constant_(model.head.bias, 40.0)
    return Setup(model, (torch.randn(6, 8), torch.ones(6)))


class FastSoftmax(torch.autograd.Function):
    """A softmax whose backward keeps only its result."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        weight = torch.exp(x)  # culprit: custom_function
        y = weight / weight.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(dim=-1, keepdim=True))


class Mixture(nn.Module):
    """Weights of a mixture by the fast softmax."""

    def forward(self, logits: Tensor) -> Tensor:
        return FastSoftmax.apply(logits)


@failure("a torch.autograd.Function whose forward overflows", module="mixture", operations="exp")
def custom_function() -> Setup:
    model = sequence(head=nn.Linear(8, 4), mixture=Mixture())
    return Setup(model, (torch.randn(4, 8) * 400,))


class SignedSqrt(torch.autograd.Function):
    """sign(x) sqrt(|x|), as bilinear pooling has it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        root = x.abs().sqrt()
        y = x / root  # culprit: signed_sqrt
        ctx.save_for_backward(root)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return grad / (2 * root)


class BilinearPool(nn.Module):
    """Products of features, pooled, then their signed roots."""

    def forward(self, h: Tensor) -> Tensor:
        return SignedSqrt.apply(h.square().mean(1))


@failure("a torch.autograd.Function that divides by its own root at 0", module="pool", operations="div")
def signed_sqrt() -> Setup:
    model = sequence(features=nn.Sequential(nn.Linear(8, 6), nn.ReLU()), pool=BilinearPool())
    with torch.no_grad():
        model.features[0].bias[2] = -100.0  # a dead channel
    return Setup(model, (torch.randn(3, 5, 8),))
