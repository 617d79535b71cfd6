"""A trial: the batch run once more under some change, and what every module call of it saw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .batch_start import BatchStart
from .calls import ATTRIBUTE
from .casting import NARROW, autocast_kinds, first_float, replaced
from .observe import observe
from .record import Row, is_fault
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

    A watch of the model sees nothing of it: for the time of the trial its place before each call is taken.
    """
    trial = Trial()
    modules = list(start.module.modules())
    with _placed(trial, modules, names, change or Change()):
        try:
            with start.again() as call:
                call()
        except Exception as error:
            # Without its traceback, whose frames hold the activations of the run.
            trial.error = error.with_traceback(None)
    return trial


class _Observer:
    """Stands before a module's call, where `calls.py` puts a WatchedCall, after the hooks of the user's."""

    def __init__(self, trial: Trial, module: nn.Module, name: str, change: Change) -> None:
        self.trial = trial
        self.module = module
        self.name = name
        self.change = change

    def __reduce__(self) -> Any:
        """In a copy or a pickle of the module nothing stands here."""
        return type(None), ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        kinds = {
            kind: torch.get_autocast_dtype(kind)
            for kind in autocast_kinds()
            if torch.is_autocast_enabled(kind)
        }
        given = first_float((args, kwargs))
        clamp = self.change.clamp
        if clamp is not None and clamp[0] is self.module:
            args, kwargs = _clamped((args, kwargs), clamp[1])
        with ExitStack() as modes:
            for kind, dtype in kinds.items():
                if self.change.bfloat16_autocast and dtype is torch.float16:
                    # Here and not around the whole: a model may enter autocast in its own forward.
                    modes.enter_context(torch.autocast(kind, torch.bfloat16, cache_enabled=False))
            output = self.module._call_impl(*args, **kwargs)
        rows = [observe(x, label, "input") for label, x in call_leaves(args, kwargs)]
        rows += [observe(x, label, "output") for label, x in leaves(output, "output")]
        autocast = next((dtype for dtype in kinds.values() if dtype in NARROW), None)
        self.trial.calls.append(Call(self.name, tuple(rows), given, autocast))
        return output


def _clamped(value: Any, limit: float) -> Any:
    done = False

    def change(x: Tensor) -> Tensor | None:
        nonlocal done
        if done or not x.dtype.is_floating_point:
            return None
        done = True
        return x.clamp(-limit, limit)

    return replaced(value, change)


@contextmanager
def _placed(
    trial: Trial, modules: Iterable[nn.Module], names: Mapping[nn.Module, str], change: Change
) -> Iterator[None]:
    before = [(module, ATTRIBUTE in module.__dict__, module.__dict__.get(ATTRIBUTE)) for module in modules]
    try:
        for module, _, _ in before:
            module.__dict__[ATTRIBUTE] = _Observer(trial, module, names.get(module, "?"), change)
        yield
    finally:
        for module, was_there, value in before:
            if was_there:
                module.__dict__[ATTRIBUTE] = value
            else:
                module.__dict__.pop(ATTRIBUTE, None)
