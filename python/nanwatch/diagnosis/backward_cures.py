"""Cures for a non-finite gradient: each is tried on a re-run of the batch and of its backward.

The gradients of the guilty module's outputs are not there a second time. Others of the same size stand in for them, and
go through the backward of the module and of all that lies before it, down to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from math import ceil, frexp, inf, isfinite, log2
from typing import Any

import torch
from torch import Tensor, nn

from ..instrumentation.functions import find_called
from ..instrumentation.slot import wrap_calls
from ..instrumentation.wrapped_names import unwrapped
from ..precision.precision import run_in_fp32
from ..records.headroom import least_bits
from ..records.record import Record
from ..report.finding import Cure, working_first
from ..util.visible import spell
from .batch_snapshot import BatchSnapshot
from .diagnosis import BackwardStart
from .experiment import (
    gradient_record,
    in_float32,
    module_words,
    run_backward,
    with_graph,
    with_leaves,
)

# The guilty module and the nearest around it: each costs a forward and a backward.
_MOST_MODULES = 3
_NARROW = ("float16", "bfloat16")

# The gradients that a backward makes from the present ones times a factor.
Backward = Callable[[float], list[Record]]


def try_backward_cures(
    snapshot: BatchSnapshot,
    model: nn.Module,
    start: BackwardStart,
    *,
    loss_scale: float | None,
) -> tuple[tuple[Cure, ...], tuple[str, ...]]:
    """Return `(cures, remarks)`: a smaller loss scale, and float32 for the module of `start` or one around it.

    Tried only where half precision takes part in the backward from `start`. A cure works when every gradient from there
    on is finite and leaves a bit of room. The model is left as it was. Raises nothing of its own: a trial that fails is
    a remark.
    """
    name = start.name
    search = _Search(snapshot, model, start)
    cures: list[Cure] = []
    remarks: list[str] = []
    steps: list[tuple[str, Callable[[], Cure | None]]] = [
        ("a smaller loss scale", lambda: search.smaller_scale(loss_scale)),
        (f"{module_words(name)} in float32", search.in_float32),
    ]
    for what, step in steps:
        try:
            if (cure := step()) is not None:
                tried = f"tried on the backward of {module_words(name)}"
                cures.append(replace(cure, what=f"{cure.what}, {tried}"))
        except Exception as error:  # such as a function that cannot be run backward more often
            remarks.append(f"could not try {what}: {spell(error)}")
    return working_first(cures), tuple(remarks)


class _Search:
    def __init__(self, snapshot: BatchSnapshot, model: nn.Module, start: BackwardStart) -> None:
        self._snapshot = snapshot
        self._model = model
        self._name, self._number, self._gradients = start
        self._made: list[Record] = []

    def smaller_scale(self, present: float | None) -> Cure | None:
        """Return the cure of a smaller loss scale; None where it is not known whether it helps."""
        given = [gradient_record(x, "") for x in self._gradients.values()]
        with self._backward() as backward:
            self._made = backward(1.0)
            return None if self._is_finite(self._made) else try_smaller(backward, given, present)

    def in_float32(self) -> Cure | None:
        """Return the smallest module around the guilty one that makes all finite in float32, or None."""
        if self._is_finite(self._made) or not any(one.dtype in _NARROW for one in self._made):
            return None
        for name in self._around():
            if (found := find_called(self._model, name)) is None:
                continue
            with self._backward(lambda module=found.module: run_in_fp32(module)) as backward:  # type: ignore[misc]
                room = room_of(backward(1.0), _NARROW)
            if room >= LEAST_ROOM:
                return Cure(in_float32(self._model, name), True, room if isfinite(room) else None)
        return None

    def _around(self) -> list[str]:
        """Return the guilty module and those around it within the outermost call, the nearest first."""
        names, name = [self._name], self._name
        outermost = unwrapped(self._snapshot.module)
        while name and len(names) < _MOST_MODULES:
            found = find_called(self._model, name)
            if found is None or found.module is outermost:
                break
            name = name.rpartition(".")[0]
            above = find_called(self._model, name)
            if name and above is not None and type(above.module).forward is not nn.Module.forward:
                names.append(name)
        return names

    @staticmethod
    def _is_finite(made: Sequence[Record]) -> bool:
        return not any(one.is_fault for one in made)

    @contextmanager
    def _backward(self, hold: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Iterator[Backward]:
        """Run the batch once more with its graph, under the change that `hold` makes, for the block."""
        found = find_called(self._model, self._name)
        if found is None:
            raise LookupError(f"the model has no module {self._name!r} any more")
        roots: dict[str, Tensor] = {}
        number = -1

        def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal number
            number += 1
            this = number
            output = module._call_impl(*args, **kwargs)
            if this == self._number:
                roots.update(one for one in with_graph(output) if one[0] in self._gradients)
            return output

        def backward(factor: float) -> list[Record]:
            records: list[Record] = []

            def look(made: Sequence[Tensor | None], _: Any) -> None:
                records.extend(gradient_record(x, "") for x in made if x is not None)

            given = [self._gradients[label].to(x.dtype) * factor for label, x in roots.items()]
            run_backward(list(roots.values()), wanted, given, lambda _: look)
            return records

        snapshot, wanted = with_leaves(self._snapshot)
        with hold(), snapshot.again() as call, torch.enable_grad(), wrap_calls({found.module}, seen):
            call()
            if not roots:
                raise LookupError(f"its call {self._number} was not made again with a graph")
            yield backward


# One bit of room is left where it can be, as one more doubling of the loss would else be the next failure.
LEAST_ROOM = 1
# Past the range of float16 (2^-24 to 2^16) there is nothing to be gained.
_MOST = 2.0**40
_SCALED = "float16"


def try_smaller(
    backward: Callable[[float], Sequence[Record]], given: Sequence[Record], scale: float | None
) -> Cure | None:
    """Return the largest loss scale below the present one with which all gradients of a backward are finite.

    `backward(factor)` makes it from gradients that are so many times those of the failure, which were `given`, and
    returns a record of each gradient that came up; with 1 it has failed. `scale` is the present loss scale, None where
    nobody knows it. It is run at most 9 times. None where no float16 takes part, whose range is the reason to scale, or
    where nothing was shown; a cure that does not work where the scale is known and a scale of 1 does not help either.
    """
    if not any(one.dtype == _SCALED for one in (*given, *backward(1.0))):
        return None
    most = min(_MOST if scale is None else scale, _largest_divisor(given))
    divisor = 1.0
    while divisor < most:
        divisor = min(max(2.0, divisor**2), most)
        room = room_of(backward(1 / divisor))
        if room >= LEAST_ROOM or (divisor == most and room > -inf):
            # A backward is in proportion to what it is given, so what is to spare can be given back.
            spare = room - LEAST_ROOM if isfinite(room) else 0.0
            least = max(2.0, 2.0 ** ceil(log2(divisor) - spare))
            if least < divisor and (again := room_of(backward(1 / least))) >= LEAST_ROOM:
                divisor, room = least, again
            return Cure(_words(divisor, scale), room >= LEAST_ROOM, room if isfinite(room) else None)
    return Cure(_words(scale, scale), False) if scale is not None and most == scale > 1 else None


def _largest_divisor(given: Sequence[Record]) -> float:
    """Return by how much these may be divided before the largest element of one becomes subnormal."""
    divisors = [
        one.abs_max / ends.smallest_normal for one in given if one.abs_max and (ends := one.ends) is not None
    ]
    # Rounded down to a power of two, for a division that rounds nothing.
    return max(1.0, 2.0 ** (frexp(min(*divisors, _MOST))[1] - 1)) if divisors else 1.0


def room_of(made: Sequence[Record], dtypes: Sequence[str] = (_SCALED,)) -> float:
    """Return the bits between the largest gradient of these formats and the end; -inf where one is non-finite."""
    if any(one.isfinite is False for one in made):
        return -inf
    bits = least_bits(one for one in made if one.dtype in dtypes)
    return inf if bits is None else bits


def _words(divisor: float, scale: float | None) -> str:
    if scale is None:
        return f"a loss scale that is {divisor:g} times smaller"
    return f"a loss scale of {scale / divisor:g} in place of {scale:g}"
