"""Weights that move and are not meant to: frozen ones, second copies of tied ones, and those that decay wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...instrumentation.wrapped_names import named_modules
from .samples import WeightSample, each_weight, number, plain
from .view import StepView, Suspect

# A weight that somebody multiplies between two steps keeps at least this much of it.
_KEPT = 0.5
# Keys of groups that mean weight decay, in one optimizer or another.
_DECAYS = frozenset({"decay", "wd", "weight_decay", "weight_decay_rate", "l2", "l2_reg", "lambda"})


def not_meant(view: StepView) -> Iterator[Suspect]:
    """Yield what may have a fault of these kinds at this step."""
    for one in view.samples.of_optimizer():
        if not (one.is_trained and one.is_meant) and one.has_moved:
            yield Suspect("frozen-moved", one.module, one.label)
    yield from _never_decayed(view)
    yield from _decayed_twice(view)
    if view.is_first:
        yield from _ties(view)


def _decay(view: StepView, one: WeightSample) -> float:
    return 0.0 if one.group is None else number(view.samples.groups[one.group].get("weight_decay")) or 0.0


def _never_decayed(view: StepView) -> Iterator[Suspect]:
    matrices = [one for one in view.trained() if len(one.shape) > 1]
    # A key that the optimizer does not read.
    ignored = {
        place
        for place, group in enumerate(view.samples.groups)
        for key in group.keys() & _DECAYS - view.optimizer.defaults.keys()
        if number(group[key])
    }
    for one in matrices:
        if one.group in ignored and not _decay(view, one):
            yield Suspect("never-decayed", one.module, one.label)
    if not any(number(group.get("weight_decay")) for group in view.samples.groups):
        return
    if not any(_decay(view, one) for one in matrices):
        for one in matrices:
            yield Suspect("never-decayed", one.module, one.label)


def _decayed_twice(view: StepView) -> Iterator[Suspect]:
    penalized = {number for probe in view.probes for own, _, _ in probe.arrivals for number in own.penalized}
    for one in view.trained():
        if not _decay(view, one):
            continue
        before = view.before(one.key)
        if id(one.tensor()) in penalized or (before is not None and _was_shrunk(before, one)):
            yield Suspect("decayed-twice", one.module, one.label, {"weight_decay": _decay(view, one)})


def _was_shrunk(before: WeightSample, one: WeightSample) -> bool:
    """Return whether all elements were multiplied by one number since the step before."""
    if before.after is None or one.before is None or len(before.after) != len(one.before):
        return False
    old, new = before.after.double(), one.before.double()
    square = float(old.dot(old))
    factor = float(old.dot(new)) / square if square else 1.0
    # The products are rounded.
    eps = torch.finfo(one.before.dtype).eps
    return _KEPT <= factor < 1 - 2 * eps and bool(((new - factor * old).abs() <= eps * old.abs()).all())


def _ties(view: StepView) -> Iterator[Suspect]:
    shared: dict[tuple[Any, ...], str] = {}
    for module, label, x in each_weight(view.model):
        values = plain(x) if x.requires_grad else None
        if values is not None and values.numel() and values.untyped_storage().nbytes():
            place = (values.device, values.data_ptr(), tuple(values.shape), values.stride())
            if place in shared:
                yield Suspect("tie-broken", module, label)
            shared[place] = module
    if (pair := _said_to_be_tied(view.model)) is not None:
        (name, weight), (_, other) = pair
        if weight is not other and weight.shape == other.shape and weight.requires_grad:
            yield Suspect("tie-broken", name, "weight")


def _said_to_be_tied(model: nn.Module) -> tuple[tuple[str, Tensor], tuple[str, Tensor]] | None:
    """Return the output and the input embedding of a model whose configuration says that they are one weight."""
    for _, _, module in named_modules(model):
        config = getattr(module, "config", None)
        if getattr(config, "tie_word_embeddings", False) is True and hasattr(module, "get_output_embeddings"):
            whole: Any = module
            ends = whole.get_output_embeddings(), whole.get_input_embeddings()
            found = [
                (one.name, one.module) for end in ends for one in named_modules(model) if one.module is end
            ]
            weights = [
                (name, own) for name, end in found if isinstance(own := end._parameters.get("weight"), Tensor)
            ]
            return (weights[0], weights[1]) if len(weights) == 2 else None
    return None
