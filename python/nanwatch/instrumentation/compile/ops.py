"""Operators that a watched model has in a compiled graph, and their way to a recorder.

A graph holds numbers and tensors, no Python objects, so each operator takes the number of a recorder. The compiled part
has kernels of its own for the operators (csrc/recorder/call_recorder_compiled.cpp), and falls back to those here. A
model that is watched again, after its first watch has stopped, gets its number back, so that the graph compiled before
serves the new watch.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...numerics._ops import define
from ...util.modules import WeakIdentityDict

NOBODY = -1  # the caller of a call that no watched call of the same graph made

_recorders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers: WeakIdentityDict[list[int]] = WeakIdentityDict()
_next_number = itertools.count()


def register_recorder(model: nn.Module, recorder: Any) -> int:
    """Give the recorder of `model` the number by which compiled code finds it."""
    numbers = _numbers.get(model)
    if numbers is None:
        numbers = _numbers[model] = []
    free = [one for one in numbers if one not in _recorders]
    number = free[0] if free else next(_next_number)
    if not free:
        numbers.append(number)
    _recorders[number] = recorder
    recorder.watch = number
    return number


def unregister_recorder(recorder: Any) -> None:
    """Take the recorder's number away. Its operators in compiled code do nothing from now on."""
    number: int = recorder.watch
    if _recorders.get(number) is recorder:
        del _recorders[number]
    recorder.watch = -1


def _begin(sequence: Tensor, watch: int, callee: int, tensors: Sequence[Tensor]) -> None:
    _count(sequence)
    if (recorder := _recorders.get(watch)) is not None:
        recorder.begin_compiled(callee, list(tensors))


def _record(
    sequence: Tensor, watch: int, callee: int, caller: int, plan: str, tensors: Sequence[Tensor]
) -> None:
    _count(sequence)
    if (recorder := _recorders.get(watch)) is not None:
        recorder.record_compiled(callee, caller, plan, list(tensors))


def _poll(sequence: Tensor, watch: int) -> None:
    _count(sequence)
    if (recorder := _recorders.get(watch)) is not None:
        recorder.poll(False)


def _count(sequence: Tensor) -> None:
    if sequence.device.type == "cpu":
        sequence.add_(1)


def _fake_nothing(*_: object) -> None:
    """Do nothing: the operators count calls in `sequence`, and no code reads that count."""


# No argument may be called `node` or `self`: Inductor passes an operator's arguments by name, among names of its own.
begin_ = define(
    "begin_(Tensor(a!) sequence, int watch, int callee, Tensor[] tensors) -> ()", _begin, _fake_nothing
)
record_ = define(
    "record_(Tensor(a!) sequence, int watch, int callee, int caller, str plan, Tensor[] tensors) -> ()",
    _record,
    _fake_nothing,
)
poll_ = define("poll_(Tensor(a!) sequence, int watch) -> ()", _poll, _fake_nothing)
