"""Modules of PyTorch used wrongly, where the guilty line is the one that calls them, and functions of autograd."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.case import Setup, failure, sequence


class FineTuning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20)
        self.loss = nn.CrossEntropyLoss(ignore_index=-100)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(ids))
        return self.loss(logits.flatten(0, 1), labels.flatten())  # culprit: ignored_labels


@failure(module="loss", operations="nll_loss_forward nll_loss nll_loss_nd cross_entropy_loss")
def ignored_labels() -> Setup:
    """All labels of a batch are ignored."""
    ids = torch.randint(0, 20, (2, 6))
    return Setup(FineTuning(), (ids, torch.full((2, 6), -100)))


class SignedSqrt(torch.autograd.Function):
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
    def forward(self, h: Tensor) -> Tensor:
        return SignedSqrt.apply(h.square().mean(1))


@failure(module="pool", operations="div")
def signed_sqrt() -> Setup:
    """A torch.autograd.Function divides by its own root at 0."""
    model = sequence(features=nn.Sequential(nn.Linear(8, 6), nn.ReLU()), pool=BilinearPool())
    with torch.no_grad():
        model.features[0].bias[2] = -100.0  # a dead channel
    return Setup(model, (torch.randn(3, 5, 8),))
