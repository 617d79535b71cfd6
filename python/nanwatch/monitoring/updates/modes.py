"""Modes in which a model is trained: dropout and batch norm that are off, autocast that does not apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ...instrumentation.wrapped_names import named_modules
from .view import StepView, Suspect

_DROPS = ("p", "dropout", "drop_prob", "dropout_p", "attention_dropout")
# So many layers that compute in float32 under autocast are no exception that is meant, such as a router.
_LEAST_LAYERS = 2


def drops(module: nn.Module) -> bool:
    """Return whether a module of its own has dropout that is not 0."""
    values = (vars(module).get(name) for name in _DROPS)
    return any(isinstance(one, float) and 0 < one < 1 for one in values)


def takes_statistics(module: nn.Module) -> bool:
    """Return whether a module in training mode changes running statistics, with a momentum: not a recalibration's."""
    return isinstance(module, _NormBase) and bool(module.track_running_stats) and module.momentum is not None


def depends_on_mode(model: nn.Module) -> bool:
    """Return whether some module in training mode computes something else than in evaluation mode."""
    return any(
        one.module.training and (drops(one.module) or takes_statistics(one.module))
        for one in named_modules(model)
    )


def modes(view: StepView, trained_before: Mapping[str, bool]) -> Iterator[Suspect]:
    """Yield what may have a fault of these kinds; `trained_before` has the modules that were in training mode once."""
    yield from _train_mode(view, trained_before)
    yield from _autocast(view)


def _train_mode(view: StepView, trained_before: Mapping[str, bool]) -> Iterator[Suspect]:
    called = {call.module for call in view.calls}
    if view.model.training:
        # A part of the model that was left in evaluation mode, though it is trained and had dropout before.
        moving = [one.module for one in view.trained() if one.grad == "some"]
        for name, _, module in named_modules(view.model):
            parent = name.rpartition(".")[0]
            is_off = not module.training and trained_before.get(name) and name in called
            if is_off and drops(module) and any(f"{own}.".startswith(f"{parent}.") for own in moving):
                yield Suspect("train-mode-wrong", parent, None)
        return
    for name, _, module in named_modules(view.model):
        off = not module.training and name in called
        if off and (drops(module) or (takes_statistics(module) and trained_before.get(""))):
            yield Suspect("train-mode-wrong", "", None)
            return


def _autocast(view: StepView) -> Iterator[Suspect]:
    layers = [call for call in view.calls if call.cast_to]
    if not view.casts or len(layers) < _LEAST_LAYERS:
        return
    wide = [call for call in layers if call.cast_to == "float32"]
    if 2 * len(wide) > len(layers) and _is_wide(view.model):
        if len(wide) == len(layers):
            yield Suspect("autocast-not-applied", "", None)
        else:
            for name in dict.fromkeys(call.module for call in wide):
                yield Suspect("autocast-not-applied", name, "weight")


def _is_wide(model: nn.Module) -> bool:
    return all(x.dtype == torch.float32 for x in model.parameters() if x.is_floating_point())
