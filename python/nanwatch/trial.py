"""A trial: the batch run once more under some change, and what every module call of it saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .batch_start import BatchStart
from .casting import NARROW, autocast_kinds, first_float, replaced
from .observe import observe
from .record import Row, is_fault
from .stand_in import stand_in
from .walk import call_leaves, leaves


@dataclass(frozen=True, slots=True)
class Call:
    """One module call: its rows (inputs, outputs), the first floating-point dtype given, autocast's where it was on."""

    name: str
    rows: tuple[Row, ...]
    given: torch.dtype | None
    autocast: torch.dtype | None


@dataclass(slots=True)
class Trial:
    """The calls of a run in the order in which they ended, and the exception that ended the run, if one did."""

    calls: list[Call] = field(default_factory=list)
    error: Exception | None = None

    def rows(self, name: str, label: str) -> list[Row]:
        """The rows of that label in all calls of that module."""
        return [row for call in self.calls if call.name == name for row in call.rows if row[0] == label]

    def faults(self) -> Iterator[tuple[str, str]]:
        """`(module, label)` of each row that is not finite and should be."""
        for call in self.calls:
            yield from ((call.name, row[0]) for row in call.rows if is_fault(row))


@dataclass(frozen=True, slots=True)
class Change:
    """What a trial changes at the module calls themselves: half precision of autocast to bfloat16, or a clamp.

    `clamp` is `(module, limit)`: the first floating-point tensor that is given to the module is clamped to ±limit.
    """

    bfloat16_autocast: bool = False
    clamp: tuple[nn.Module, float] | None = None


def run(start: BatchStart, names: Mapping[nn.Module, str], change: Change | None = None) -> Trial:
    """Run the batch of `start` once more. What its forward raises is the trial's error; KeyboardInterrupt passes.

    A watch of the model sees nothing of it.
    """
    trial = Trial()
    change = change or Change()

    def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output, call = _changed_call(module, args, kwargs, change, names.get(module, "?"))
        trial.calls.append(call)
        return output

    try:
        with start.again() as call, stand_in(start.module.modules(), seen):
            call()
    except Exception as error:
        # Without its traceback, whose frames hold the activations of the run.
        trial.error = error.with_traceback(None)
    return trial


def _changed_call(module: nn.Module, args: Any, kwargs: Any, change: Change, name: str) -> tuple[Any, Call]:
    kinds = {
        kind: torch.get_autocast_dtype(kind) for kind in autocast_kinds() if torch.is_autocast_enabled(kind)
    }
    given = first_float((args, kwargs))
    if change.clamp is not None and change.clamp[0] is module:
        args, kwargs = _clamped((args, kwargs), change.clamp[1])
    with ExitStack() as modes:
        for kind, dtype in kinds.items():
            if change.bfloat16_autocast and dtype is torch.float16:
                # Here and not around the whole: a model may enter autocast in its own forward.
                modes.enter_context(torch.autocast(kind, torch.bfloat16, cache_enabled=False))
        output = module._call_impl(*args, **kwargs)
    rows = [observe(x, label, "input") for label, x in call_leaves(args, kwargs)]
    rows += [observe(x, label, "output") for label, x in leaves(output, "output")]
    autocast = next((dtype for dtype in kinds.values() if dtype in NARROW), None)
    return output, Call(name, tuple(rows), given, autocast)


def _clamped(value: Any, limit: float) -> Any:
    done = False

    def change(x: Tensor) -> Tensor | None:
        nonlocal done
        if done or not x.dtype.is_floating_point:
            return None
        done = True
        return x.clamp(-limit, limit)

    return replaced(value, change)
