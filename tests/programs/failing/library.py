"""Modules of PyTorch's own, used wrongly: the guilty line is the one that calls them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from programs.case import PRODUCTS, Setup, failure


class FineTuning(nn.Module):
    """Next-token loss, with the prompt's labels ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20)
        self.loss = nn.CrossEntropyLoss(ignore_index=-100)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(ids))
        return self.loss(logits.flatten(0, 1), labels.flatten())  # culprit: ignored_labels


@failure(
    "cross entropy of a batch whose labels are all ignored",
    module="loss",
    operations="nll_loss_forward nll_loss nll_loss_nd cross_entropy_loss",
)
def ignored_labels() -> Setup:
    ids = torch.randint(0, 20, (2, 6))
    return Setup(FineTuning(), (ids, torch.full((2, 6), -100)))


class Recogniser(nn.Module):
    """Speech to characters by CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 12)
        self.loss = nn.CTCLoss()

    def forward(self, frames: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        scores = self.head(frames).log_softmax(-1)
        steps = torch.full((frames.shape[1],), frames.shape[0])
        return self.loss(scores, text, steps, lengths)  # culprit: ctc_too_long


@failure(
    "CTC with a text longer than its frames",
    module="loss",
    value="inf",
    operations="_ctc_loss ctc_loss",
)
def ctc_too_long() -> Setup:
    text = torch.randint(1, 12, (2, 7))
    return Setup(Recogniser(), (torch.randn(5, 2, 8), text, torch.tensor([3, 7])))


class NoEps(nn.Module):
    """A layer norm whose eps was configured away."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, eps=0.0)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))  # culprit: eps_of_zero


@failure(
    "nn.LayerNorm with eps=0 on a constant row", module="norm", operations="native_layer_norm layer_norm"
)
def eps_of_zero() -> Setup:
    x = torch.randn(3, 8)
    x[1] = 2.0
    return Setup(NoEps(), (x,))


class ZeroStart(nn.Module):
    """A weight-normed layer that is to start at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 8)
        self.out = parametrizations.weight_norm(nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))  # culprit: weight_norm_of_zero


@failure(
    "a weight-normed layer initialised with zeros",
    module="out.parametrizations.weight.0",
    operations="_weight_norm_interface _weight_norm div",
)
def weight_norm_of_zero() -> Setup:
    model = ZeroStart()
    nn.init.zeros_(model.out.parametrizations.weight.original1)
    return Setup(model, (torch.randn(3, 8),))


class Recurrent(nn.Module):
    """A linear recurrence over a long sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            h = self.cell(h + x[:, step])  # culprit: recurrence
        return h


@failure("a recurrence that grows over a long sequence", module="cell", value="inf", operations=PRODUCTS)
def recurrence() -> Setup:
    model = Recurrent(16)
    with torch.no_grad():
        model.cell.weight.mul_(6)
    return Setup(model, (torch.randn(2, 200, 16),))
