"""Runs of one model for a comparison: as it is, as a copy in another precision, and with rounded weights."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..numerics.ranges import fingerprint
from ..numerics.readable import dtype_name
from ..util.modules import each_module, each_parameter
from .calls import CallPair, ModuleCall, recorded
from .differences import Store, are_of_a_kind, gaps, own_tensors
from .state import State

Caller = Callable[[nn.Module, Any], Any]
# Calls by their keys, in the order of their starts.
Runs = dict[tuple[str, int], ModuleCall]
# Path of a module, and name of its parameter or buffer.
Key = tuple[str, str]
# By precision.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class ModelRuns:
    """One of two models, and how to run it. `dtype` is that of most outputs, `stored` that of most parameters."""

    def __init__(
        self, model: nn.Module, call: Caller | None, inputs: Any, state: State, most_bytes: int
    ) -> None:
        self._model = model
        self._modules = dict(each_module(model))
        self._call = call
        self._inputs = inputs
        self._state = state
        self._most_bytes = most_bytes
        self._rounding: torch.dtype | None = None
        self.calls = self._run(model, None)
        self.dtype = _dtype_of(self.calls)
        self.stored = most_common((x.dtype for x in each_parameter(model)), self.dtype)
        self._runs = {self.dtype: {one.key: one for one in self.calls}}

    def run_in(self, dtype: torch.dtype) -> Runs:
        """Return the calls of a copy in this dtype, or of the model itself where that is its own."""
        if dtype not in self._runs:
            self._runs[dtype] = self._run_copy(dtype, ())
        return self._runs[dtype]

    def copied(self, dtype: torch.dtype, stored: torch.dtype) -> ModelRuns:
        """Return the model as a copy in `dtype`, with weights that are rounded to `stored` before."""
        found = copy.copy(self)
        if FLOATS.index(stored) > FLOATS.index(self.stored):
            found._rounding, found.stored, found._runs = stored, stored, {}
        found.calls = list(found.run_in(dtype).values())
        found.dtype = _dtype_of(found.calls)
        if found.dtype is not dtype:
            raise ValueError(f"it computes in {dtype_name(found.dtype)} there too")
        return found

    def shaken(self, keys: Iterable[Key]) -> Runs:
        """Return the calls of a copy, with these tensors as far from their values as rounding may have put them."""
        return self._run_copy(self.dtype, keys)

    def tensors(self) -> dict[Key, Tensor]:
        """Return the parameters and buffers of floating-point dtypes, rounded where the copies' are."""
        return {
            (path, name): x if self._rounding is None else x.to(self._rounding)
            for path, module in self._modules.items()
            for name, x in own_tensors(module).items()
        }

    def _run_copy(self, dtype: torch.dtype, shaken: Iterable[Key]) -> Runs:
        model = copy.deepcopy(self._model)
        if self._rounding is not None:
            model.to(self._rounding)
        modules = dict(each_module(model))
        steps = [(key, torch.finfo(own_tensors(modules[key[0]])[key[1]].dtype).eps / 2) for key in shaken]
        model.to(dtype)
        generator = torch.Generator().manual_seed(0)
        for (path, name), step in steps:
            x = own_tensors(modules[path])[name]
            signs = torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1
            x.mul_(1 + step * signs)
        if self.dtype is not self.stored:  # the call makes it compute under autocast
            device = next((x.device.type for x in each_parameter(model)), "cpu")
            model.forward = torch.autocast(device, enabled=False)(model.forward)
        calls = self._run(model, dtype)
        for one in calls:
            one.module = self._modules[one.path]  # so that the copy is freed
        return {one.key: one for one in calls}

    def _run(self, model: nn.Module, dtype: torch.dtype | None) -> list[ModuleCall]:
        self._state.restore()
        device = next((x.device for x in each_parameter(model)), None)

        def moved(x: Tensor) -> Tensor:
            return x.detach().clone().to(device, dtype if x.is_floating_point() else None)

        inputs = tree_map_only(Tensor, moved, self._inputs)
        with torch.no_grad(), recorded(model, Store(self._most_bytes)) as log:
            if self._call is not None:
                self._call(model, inputs)
            elif isinstance(inputs, Mapping):
                model(**inputs)
            else:
                model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
        calls = log.calls
        root = next((one for one in reversed(calls) if one.parent is None), None)
        if root is None:
            raise ValueError(f"no module of the {type(model).__name__} was called: see call_a and call_b")
        inside = [one for one in calls if one is root or root.holds(one)]  # a warm-up comes before
        return sorted(inside, key=lambda one: one.start)


def rounded_apart(
    pairs: Sequence[CallPair], sides: tuple[ModelRuns, ModelRuns]
) -> tuple[list[Key], list[Key]]:
    """Return the tensors of each side that the other has not bit for bit: they may have been rounded on their way.

    Such are a buffer of frequencies that the other side computes, and a weight into which a factor went. A buffer that
    modules of one kind have further apart than rounding makes it is a difference of its own.
    """
    left = (sides[0].tensors(), sides[1].tensors())
    for pair in pairs:
        ours, theirs = pair.modules
        is_one_kind = are_of_a_kind(ours, theirs)
        for name, gap in gaps(ours, theirs).items():
            is_buffer = all(name in one._buffers for one in (*ours, *theirs))
            if gap.error == 0.0 or (is_one_kind and is_buffer and not gap.is_rounding):
                for found, calls in zip(left, (pair.a, pair.b), strict=True):
                    for call in calls:
                        found.pop((call.path, name), None)
    stored = max((side.stored for side in sides), key=FLOATS.index)
    prints = [{key: fingerprint(x.to(stored)) for key, x in found.items()} for found in left]
    known = [
        {fingerprint(x.to(stored)) for x in side.tensors().values()} if any(left) else set() for side in sides
    ]
    a, b = ([key for key, one in prints[i].items() if one not in known[1 - i]] for i in (0, 1))
    return a, b


def _dtype_of(calls: Sequence[ModuleCall]) -> torch.dtype:
    return most_common((kept.rows.dtype for one in calls for kept in one.outputs), torch.float32)


def most_common(dtypes: Iterable[torch.dtype], otherwise: torch.dtype) -> torch.dtype:
    """Return the commonest of the floating-point dtypes, or `otherwise` where there is none."""
    known = [dtype for dtype, _ in Counter(dtypes).most_common() if dtype in FLOATS]
    return known[0] if known else otherwise
