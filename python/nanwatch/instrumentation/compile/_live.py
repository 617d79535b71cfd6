"""The recorders that compiled code reaches, by number, and the operators' way to them where no native kernel serves.

A graph holds numbers, no objects. A model that is watched again, after the first watch of it has stopped, gets the
number that it had: the graph compiled then serves the new watch as it is.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...util.modules import WeakIdentityDict

NOBODY = -1  # the caller of a call that no watched call of the same graph made

_recorders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers: WeakIdentityDict[list[int]] = WeakIdentityDict()
_next_number = itertools.count()


def enter(model: nn.Module, recorder: Any) -> int:
    """Give the recorder of `model` its number."""
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


def leave(recorder: Any) -> None:
    """From now on compiled code does not reach the recorder; its operators do nothing."""
    number: int = recorder.watch
    if _recorders.get(number) is recorder:
        del _recorders[number]
    recorder.watch = -1


def begin(sequence: Tensor, watch: int, callee: int, tensors: Sequence[Tensor]) -> None:
    """See `compile_ops.begin_`."""
    _count(sequence)
    if (recorder := _recorders.get(watch)) is not None:
        recorder.begin_compiled(callee, list(tensors))


def record(
    sequence: Tensor, watch: int, callee: int, caller: int, plan: str, tensors: Sequence[Tensor]
) -> None:
    """See `compile_ops.record_`."""
    _count(sequence)
    if (recorder := _recorders.get(watch)) is not None:
        recorder.record_compiled(callee, caller, plan, list(tensors))


def look(sequence: Tensor, watch: int) -> None:
    """See `compile_ops.look_`."""
    _count(sequence)
    if (recorder := _recorders.get(watch)) is not None:
        recorder.look(False)


def _count(sequence: Tensor) -> None:
    if sequence.device.type == "cpu":
        sequence.add_(1)
