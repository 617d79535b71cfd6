"""Predictions that a loss was made of: how far two runs are apart, token by token, with less noise than their losses.

The loss of a batch moves up and down with its labels. A layer that is slightly wrong may make it smaller. Two numbers
tell layers apart where the loss does not: the standard error of the change, from the differences of each token's loss,
and the divergence, which asks for no labels. For cross-entropy it is the Kullback-Leibler divergence from the model as
it is, and for a squared error the mean square of the change. Both are what the loss would grow by if the model's own
predictions were the truth, so they have the unit of the loss and are never below zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, mse_loss
from torch.overrides import TorchFunctionMode

# Elements of predictions that are kept, in float32: 128 MiB. Of more every n-th token is.
_MOST = 1 << 25
_PARTS = 64


class Predictions(NamedTuple):
    """Losses of the tokens of a batch, and by token the log-probabilities of the classes, or a value."""

    losses: Tensor
    values: Tensor
    is_logarithm: bool


def differences(run: Predictions | None, base: Predictions | None) -> tuple[float | None, float | None]:
    """Return the standard error of the difference of the mean losses, and the divergence of `run` from `base`.

    None for what is not known, as the error of a single token, or all of a run with other tokens.
    """
    if run is None or base is None or run.values.shape != base.values.shape or not len(run.losses):
        return None, None
    change = run.values - base.values
    # Of -p change, which has the same sum, the terms are not positive one by one, and round off more.
    terms = base.values.exp() * (change.expm1() - change) if run.is_logarithm else change.square()
    terms = terms.where(base.values.isfinite(), 0.0)  # a class that is masked
    divergence = float(terms.sum(-1).double().mean())
    # Neighbours have a text or a picture in common, so their losses move together: means of parts are compared.
    losses = torch.stack(
        [x.mean() for x in (run.losses - base.losses).double().tensor_split(_PARTS) if len(x)]
    )
    error = float(losses.std() / len(losses) ** 0.5) if len(losses) > 1 else None
    return error, divergence


class Seen(TorchFunctionMode):
    """Mode that keeps what the last cross-entropy or squared error with the reduction "mean" was made of."""

    latest: Predictions | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS:
            with torch.no_grad():
                self.latest = _READERS[func](*args, **(kwargs or {})) or self.latest
        return func(*args, **(kwargs or {}))


def _classes(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Predictions | None:
    if reduction != "mean" or input.ndim < 2:
        return None
    logits = input.detach().movedim(1, -1).flatten(0, -2).float()
    labels = target.flatten(0, -2) if target.is_floating_point() else target.flatten()
    if not target.is_floating_point():
        kept = labels != ignore_index
        logits, labels = logits[kept], labels[kept]
    losses = cross_entropy(logits, labels, weight, reduction="none", label_smoothing=label_smoothing)
    return Predictions(losses, log_softmax(_part(logits), -1), True)


def _squares(
    input: Tensor,
    target: Tensor,
    size_average: object = None,
    reduce: object = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Predictions | None:
    if reduction != "mean" or weight is not None or input.shape != target.shape:
        return None
    values = input.detach().float().reshape(-1, 1)
    return Predictions((values - target.float().reshape(-1, 1)).square()[:, 0], _part(values), False)


def _part(values: Tensor) -> Tensor:
    return values[:: -(-values.numel() // _MOST) or 1].clone()


_READERS: dict[Any, Any] = {cross_entropy: _classes, mse_loss: _squares}
