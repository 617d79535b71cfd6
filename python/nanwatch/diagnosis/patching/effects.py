"""What a change does to values: against those before, and against what float64 gives for the line as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import hypot
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..experiment import in_float64, without_hooks
from ..operation import tensors_in

# A working change moves the finite values by at most 1 % of their norm. More would make another model.
_MOST_CHANGE = 0.01
# A zero may move by 0.02. It needs a limit of its own, because its norm allows no change at all.
_MOST_AT_ZERO = 0.02
# Against float64 an element may be off by 1 %, or by this part of the largest one: float32 has seven digits, of which a
# stable form may lose a few. A format with fewer has 8 roundings.
_ROUNDED = 1e-4
_ROUNDINGS = 8
# Larger values are not kept for the comparison.
MOST_ELEMENTS = 1 << 24
# Of these there are as many as changes.
_MOST_TRIED = 1 << 20


def kept(value: Any) -> list[Tensor]:
    """Return copies of the tensors in a value."""
    return [x.detach().clone() for x in tensors_in(value) if x.numel() <= MOST_ELEMENTS]


class _TooLarge(Exception):  # noqa: N818
    pass


def _wide(x: Any) -> Any:
    if isinstance(x, torch.dtype):
        return torch.float64 if x.is_floating_point else torch.complex128 if x.is_complex else x
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    if x.numel() > MOST_ELEMENTS:
        raise _TooLarge
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


class Float64(TorchFunctionMode):
    """Runs each operation on float64 copies of its operands; a cast to a narrower format does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute: x.dtype is the user's
            return _wide(func(*args))
        if name in ("float", "half", "bfloat16", "double"):
            return args[0].to(torch.float64)
        args, kwargs = tree_map(_wide, (args, kwargs or {}))
        return tree_map(_wide, func(*args, **kwargs))


class Tried(NamedTuple):
    """An expression that was evaluated beside the run: its tensors, and whether its gradients are finite."""

    values: list[Tensor]
    has_finite_gradient: bool = True


def evaluated(expressions: Sequence[Callable[[], tuple[Any, Any]]]) -> list[Tried]:
    """Evaluate expressions, each given with its operands, the first in float64; one that raises has no values."""
    found: list[Tried] = []
    for number, expression in enumerate(expressions):
        tried = Tried([])
        is_small = not found or sum(x.numel() for x in found[0].values) <= _MOST_TRIED
        with suppress(Exception):
            if number == 0:
                with torch.no_grad(), Float64():
                    tried = Tried(kept(expression()[0]))
            elif is_small:
                value, operands = expression()
                tried = Tried(kept(value), _has_finite_gradient(value, operands))
        found.append(tried)
    return found


def _has_finite_gradient(value: Any, operands: Any) -> bool:
    ends = [x for x in tensors_in(value) if x.requires_grad]
    wanted = [x for x in tensors_in(operands) if x.requires_grad]
    if not ends or not wanted:
        return True
    with without_hooks(wanted):
        made = torch.autograd.grad(ends, wanted, [torch.ones_like(x) for x in ends], allow_unused=True)
    return all(x is None or bool(x.isfinite().all()) for x in made)


class Against(NamedTuple):
    """Values against those of float64, by elements.

    `total` are those that float64 gives as finite, by `size` at most, `moved` those of them that are off, by `error` at
    most: `was` became `now`. `failing` are the others, and `bad` those of them that the change leaves
    non-finite. `norm` is that of the finite ones, and `difference` that of what is off.
    """

    total: int = 0
    moved: int = 0
    size: float = 0.0
    error: float = 0.0
    was: float = 0.0
    now: float = 0.0
    failing: int = 0
    bad: int = 0
    norm: float = 0.0
    difference: float = 0.0

    @property
    def is_close(self) -> bool:
        """Return whether the difference is small by its norm: float64 rounds too, as in log(1 - p) near 1."""
        return self.difference <= _MOST_CHANGE * self.norm < torch.inf

    @property
    def is_good(self) -> bool:
        """Return whether the change ends the failure and leaves all that float64 gives."""
        return not (self.moved or self.bad)

    def __str__(self) -> str:
        """Return this in words."""
        if not self.total:
            return "float64 gives no finite value either"
        also = f"; float64 fails at {self.failing:,} too" if self.failing else ""
        if not self.moved:
            share = self.error / self.size if self.size else self.error
            return f"agrees with float64, to {share:.1e} of the largest value{also}"
        size = f"{self.was:.3g} becomes {self.now:.3g}"
        return f"moves {self.moved:,} of {self.total:,} elements that float64 gives as finite: {size}{also}"


def against(
    truth: Sequence[Sequence[Tensor]], before: Sequence[Sequence[Tensor]], values: Sequence[Sequence[Tensor]]
) -> Against | None:
    """Compare the evaluations of an expression with those in float64 and those before; None where they are no match.

    An element that is what it was before is not moved, however far rounding has put it.
    """
    found = Against()
    evaluations = zip(truth, before, values, strict=False)
    triples = [one for few in evaluations for one in zip(*few, strict=False)]
    for exact, old, value in triples:
        if not exact.shape == old.shape == value.shape or not (
            value.is_floating_point() or value.is_complex()
        ):
            return None
        ends = torch.finfo(value.dtype)
        right, new = in_float64(exact, value)
        finite = right.isfinite()
        a, b = right[finite], new[finite]
        if a.numel():
            error = (b - a).abs().nan_to_num(torch.inf, torch.inf)
            share = max(_MOST_CHANGE, _ROUNDINGS * ends.eps)
            size = float(a[a.abs() <= ends.max].abs().max()) if bool((a.abs() <= ends.max).any()) else 0.0
            is_off = error > share * a.abs() + max(_ROUNDED, ends.eps) * size
            worst = int(error.argmax())
            if float(error[worst]) >= found.error:
                was, now = (float(x[worst].real if x.is_complex() else x[worst]) for x in (a, b))
                found = found._replace(error=float(error[worst]), was=was, now=now)
            norm, difference = float(a.norm()), float(error.norm())
            found = found._replace(
                norm=hypot(found.norm, norm), difference=hypot(found.difference, difference)
            )
            largest = max(found.size, float(a.abs().max()))
            found = found._replace(
                total=found.total + a.numel(),
                size=largest,
                moved=found.moved + int((is_off & (new != old)[finite]).sum()),
            )
        bad = int((~new[~finite].isfinite()).sum())
        found = found._replace(failing=found.failing + right.numel() - a.numel(), bad=found.bad + bad)
    return found if triples else None


def effect_of(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[str, bool]:
    """Say in words what has changed between old and new values, and whether finite ones are about the same."""
    total = changed = healthy = 0
    largest = most = at_zero = difference = norm = 0.0
    for old, new in pairs:
        if old.shape != new.shape:
            return f"gives a tensor of shape {list(new.shape)} for {list(old.shape)}", False
        if old.dtype != new.dtype:
            return f"gives {new.dtype} for {old.dtype}", False
        old, new = in_float64(old, new)
        finite = torch.isfinite(old)
        total += old.numel()
        changed += int((old != new).sum())
        a, b = old[finite], new[finite]
        moved = (a - b).abs()
        healthy += int((moved != 0).sum())
        if moved.numel():
            is_zero = a == 0
            largest, most = max(largest, float(moved.max())), max(most, float(a.abs().max()))
            at_zero = max(at_zero, float(moved[is_zero].max()) if is_zero.any() else 0.0)
            difference += float(moved[~is_zero].square().sum())
            norm += float(a.abs().square().sum())
    is_small = difference <= _MOST_CHANGE**2 * norm and at_zero <= _MOST_AT_ZERO
    if not total:
        return "", True
    if not changed:
        return f"leaves all {total:,} elements bit-equal", True
    if not healthy:
        others = "" if changed == total else ", the others bit-equal"
        return f"changes {changed:,} of {total:,} elements{others}", is_small
    size = f"finite ones by at most {largest:.1e}, of values up to {most:.1e}"
    return f"changes {changed:,} of {total:,} elements, {size}", is_small
