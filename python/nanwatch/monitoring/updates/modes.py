"""Modes in which a model is trained: dropout and batch norm that are off, autocast that does not apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.spectral_norm import SpectralNorm

from ...instrumentation.wrapped_names import named_modules
from ...numerics.readable import only_our_dispatch, unreadable
from ...util.modules import is_in
from .view import StepView, Suspect

_DROPS = ("p", "dropout", "drop_prob", "dropout_p", "attention_dropout")
# So many layers that compute in float32 under autocast are no exception that is meant, such as a router.
_LEAST_LAYERS = 2
# A spectral norm that a forward in training has estimated once is nearer than that.
_FAR, _ITERATIONS = 1.5, 8


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


def unestimated(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the modules whose torch.nn.utils.spectral_norm is far too small, with the factor: none has estimated it."""
    for name, _, module in named_modules(model):
        for norm in module._forward_pre_hooks.values():
            if not isinstance(norm, SpectralNorm):
                continue
            own = [getattr(module, f"{norm.name}_{label}", None) for label in ("orig", "u", "v")]
            kept = [one for one in own if isinstance(one, Tensor) and not unreadable(one)]
            if len(kept) < len(own):
                continue
            whole, u, v = kept
            with torch.no_grad(), only_our_dispatch():
                matrix = norm.reshape_weight_to_matrix(whole).float()
                estimate, better = float(u.float() @ matrix @ v.float()), v.float()
                for _ in range(_ITERATIONS):
                    better = nn.functional.normalize(matrix.T @ (matrix @ better), dim=0)
                least = float((matrix @ better).norm())  # no vector gives more than the norm
            if least > _FAR * abs(estimate):
                yield name, least / max(abs(estimate), 1e-12)


def modes(view: StepView, trained_before: Mapping[str, bool]) -> Iterator[Suspect]:
    """Yield what may have a fault of these kinds; `trained_before` has the modules that were in training mode once."""
    yield from _train_mode(view, trained_before)
    yield from _autocast(view)
    yield from _counting(view)


def _train_mode(view: StepView, trained_before: Mapping[str, bool]) -> Iterator[Suspect]:
    called = {call.module for call in view.calls}
    if view.model.training:
        # A part of the model that was left in evaluation mode, though it is trained and had dropout before.
        moving = [one.module for one in view.trained() if one.grad == "some"]
        for name, _, module in named_modules(view.model):
            parent = name.rpartition(".")[0]
            is_off = not module.training and trained_before.get(name) and name in called
            if is_off and drops(module) and any(is_in(own, parent) for own in moving):
                yield Suspect("train-mode-wrong", parent, None)
        return
    for name, _, module in named_modules(view.model):
        off = not module.training and name in called
        if off and (drops(module) or (takes_statistics(module) and trained_before.get(""))):
            yield Suspect("train-mode-wrong", "", None)
            return


def _autocast(view: StepView) -> Iterator[Suspect]:
    layers = [call for call in view.calls if call.is_cast]
    if not view.casts or len(layers) < _LEAST_LAYERS:
        return
    if any(call.dtype != "float32" for call in layers):
        yield from _projections(view)
    wide = [call for call in layers if call.dtype == "float32"]
    if 2 * len(wide) > len(layers) and _is_wide(view.model):
        if len(wide) == len(layers):
            yield Suspect("autocast-not-applied", "", None)
        else:
            for name in dict.fromkeys(call.module for call in wide):
                yield Suspect("autocast-not-applied", name, "weight")


def _projections(view: StepView) -> Iterator[Suspect]:
    """Yield float32 layers of own classes between others that autocast runs in 16 bits: no router and no head."""
    modules = {name: module for name, _, module in named_modules(view.model)}
    last = max(place for place, call in enumerate(view.calls) if call.is_cast and call.dtype != "float32")
    for call in view.calls[:last]:
        own = modules.get(call.module)
        is_wide = call.takes_16 and call.dtype == "float32" and not call.is_cast
        if is_wide and isinstance(own, nn.Linear) and own.out_features >= own.in_features:
            yield Suspect("autocast-not-applied", call.module, "weight")


def _counting(view: StepView) -> Iterator[Suspect]:
    """Yield batch norms that no optimizer trains, and whose statistics are not frozen with their weights."""
    called = {call.module for call in view.calls}
    frozen = {name: module for name, _, module in named_modules(view.model) if _is_frozen_norm(module)}
    counting = [name for name, module in frozen.items() if module.training and name in called]
    if counting and view.is_first:
        held = view.others() | {id(x) for group in view.optimizer.param_groups for x in group["params"]}
        for name in counting:
            if not any(id(x) in held for x in frozen[name].parameters()):
                yield Suspect("frozen-moved:statistics", name, None)


def _is_frozen_norm(module: nn.Module) -> bool:
    weights = list(module._parameters.values())
    return takes_statistics(module) and not any(x is None or x.requires_grad for x in weights)


def _is_wide(model: nn.Module) -> bool:
    return all(x.dtype == torch.float32 for x in model.parameters() if x.is_floating_point())
