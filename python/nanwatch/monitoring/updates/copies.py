"""Copies of weights: float32 masters in an optimizer, and copies of weights that were tied."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ...instrumentation.wrapped_names import named_modules
from ...numerics.readable import only_our_dispatch
from ...util.modules import each_parameter, is_in
from ...util.visible import suppressed
from .samples import Key, StepSamples, each_weight, is_full, plain, same_bits, sample
from .view import StepView, Suspect

# A share of elements that may differ by how the copy was rounded.
_ROUNDED = 0.01


class Masters:
    """Float32 copies of 16-bit weights that an optimizer has in their place, found by value at its first two steps."""

    def __init__(self) -> None:
        self._known: dict[Key, weakref.ref[Tensor]] = {}
        self.replaced: frozenset[Key] = frozenset()  # by a master that was not equal before the first step

    @property
    def keys(self) -> frozenset[Key]:
        """Return the weights that have a master."""
        return frozenset(self._known)

    def differing(self, model: nn.Module, optimizer: Optimizer, step: int) -> dict[Key, float]:
        """Return the weights that no longer equal their masters, with the share of elements."""
        own = {id(x) for x in each_parameter(model)}
        left = {id(x): x for group in optimizer.param_groups for x in group["params"] if id(x) not in own}
        if not left:
            return {}
        with torch.no_grad(), only_our_dispatch():
            if step <= 2:
                found = self._find(model, left)
                # The first step has written them: they were other weights before.
                self.replaced = found if step == 2 else self.replaced
            weights = {(module, label): x for module, label, x in each_weight(model)}
            shares = {
                key: share
                for key, known in self._known.items()
                if key in weights
                and (master := known()) is not None
                and (share := _share(weights[key], master)) is not None
            }
        return {key: share for key, share in shares.items() if share > _ROUNDED}

    def _find(self, model: nn.Module, left: dict[int, Tensor]) -> frozenset[Key]:
        before = self.keys
        for module, label, x in each_weight(model):
            if x.dtype not in (torch.bfloat16, torch.float16) or (module, label) in before:
                continue
            for master in list(left.values()):
                if master.dtype != x.dtype and _share(x, master) == 0:
                    self._known[module, label] = weakref.ref(master)
                    del left[id(master)]
                    break
        return self.keys - before


def _share(x: Tensor, master: Tensor) -> float | None:
    """Return the share of elements in which a weight is not its master, rounded; None where they are no such pair."""
    own, copy = plain(x), plain(master)
    if own is None or copy is None or own.shape != copy.shape or own.device != copy.device or not own.numel():
        return None
    return float((sample(copy).to(own.dtype) != sample(own)).double().mean())


def ties(view: StepView) -> Iterator[Suspect]:
    """Yield second weights of what shares memory, or is said to be tied."""
    if not view.is_first:
        return
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
            try:
                ends = whole.get_output_embeddings(), whole.get_input_embeddings()
            except (
                Exception
            ):  # models without a text part inherit both methods from transformers, and they raise
                suppressed("the embeddings of a model could not be told")
                continue
            found = [
                (one.name, one.module) for end in ends for one in named_modules(model) if one.module is end
            ]
            weights = [
                (name, own) for name, end in found if isinstance(own := end._parameters.get("weight"), Tensor)
            ]
            return (weights[0], weights[1]) if len(weights) == 2 else None
    return None


def parted(samples: StepSamples, ends: Sequence[tuple[str, str]]) -> Iterator[Suspect]:
    """Yield the copies of once tied weights that the steps have made different."""
    after = {one.module: one.after for one in samples.weights if one.label == "weight"}
    for name, other in ends:
        own, table = after.get(name), after.get(other)
        if own is not None and table is not None and not torch.equal(own, table):
            yield Suspect("tie-broken", name, "weight")


def equal_ends(model: nn.Module) -> list[tuple[str, str]]:
    """Return an output layer and an embedding with equal weights apart: copies of one that were tied, as it seems."""
    tables: list[tuple[str, Tensor]] = []
    found: list[tuple[str, str]] = []
    for name, _, module in named_modules(model):
        if not isinstance(module, nn.Embedding | nn.Linear):
            continue
        weight = module._parameters.get("weight")
        if weight is None or not weight.requires_grad:
            continue
        if isinstance(module, nn.Embedding):
            tables.append((name, weight))
        elif is_full(weight):
            found += [(name, other) for other, table in tables if _is_copy(weight, table)]
    return found


def equal_twins(model: nn.Module) -> list[tuple[str, str]]:
    """Return children of one module with equal weights apart: a module and its copy. Lists have layers made alike."""
    found: list[tuple[str, str]] = []
    for name, _, module in named_modules(model):
        children = [(label, list(own.parameters())) for label, own in module.named_children()]
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        for place, (label, weights) in enumerate(children):
            above = f"{name}." if name else ""
            for other, copies in children[place + 1 :]:
                if weights and len(weights) == len(copies) and all(map(_is_copy, weights, copies)):
                    found += [(above + label, above + other), (above + other, above + label)]
    return found


def _is_copy(x: Tensor, other: Tensor) -> bool:
    own, copy = plain(x), plain(other)
    if own is None or copy is None or own.shape != copy.shape or own.device != copy.device:
        return False
    is_apart = own.data_ptr() != copy.data_ptr() and own.dtype == copy.dtype
    return is_apart and same_bits(sample(own), sample(copy)) and torch.equal(own, copy)


def idle_twins(view: StepView, twins: Sequence[tuple[str, str]]) -> Iterator[Suspect]:
    """Yield the weights of a copy that the optimizer holds and nobody calls, while the original is trained."""
    for name, other in twins:
        is_used = any(is_in(one.module, other) and one.grad == "some" for one in view.trained())
        if not is_used or any(is_in(call, name) for call in view.called):
            continue
        for one in view.trained():
            if is_in(one.module, name) and one.grad == "none" and one.has_moved is False:
                yield Suspect("other-module-trained:copy", one.module, one.label)
