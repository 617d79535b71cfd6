"""Effects of a change on values, against those before and against float64."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import Tensor

from nanwatch.diagnosis.patching.effects import Float64, against, effect_of, evaluated

INF, NAN = inf, nan


@pytest.mark.parametrize(
    ("old", "new", "words", "small"),
    [
        ([1.0, NAN], [1.0, 5.0], "changes 1 of 2 elements, the others bit-equal", True),
        ([NAN, INF], [0.0, 5.0], "changes 2 of 2 elements", True),
        ([1.0, 2.0], [1.0, 2.0], "leaves all 2 elements bit-equal", True),
        (
            [4.0, NAN],
            [4.001, 0.0],
            "changes 2 of 2 elements, finite ones by at most 1.0e-03, of values",
            True,
        ),
        ([4.0, NAN], [5.0, 0.0], "changes 2 of 2 elements, finite ones by at most 1.0e+00, of values", False),
        ([0.0, 4.0], [1e-6, 4.0], "changes 1 of 2 elements, finite ones by at most 1.0e-06, of values", True),
        ([0.0, 4e3], [1.0, 4e3], "changes 1 of 2 elements, finite ones by at most 1.0e+00, of values", False),
    ],
)
def test_effects_in_words(old: list[float], new: list[float], words: str, small: bool) -> None:
    pair = (torch.tensor(old, dtype=torch.float64), torch.tensor(new, dtype=torch.float64))
    told, is_small = effect_of([pair])
    assert told.startswith(words)
    assert told == words or "of values up to 4.0e" in told
    assert is_small is small


def test_a_change_of_the_dtype_is_no_cure() -> None:
    """torch.where of two numbers is float32, which no longer overflows where float16 does."""
    pair = torch.ones(2, dtype=torch.float16), torch.ones(2)
    assert effect_of([pair]) == ("gives torch.float32 for torch.float16", False)


def half(*values: float) -> list[list[Tensor]]:
    return [[torch.tensor(values, dtype=torch.float16)]]


def wide(*values: float) -> list[list[Tensor]]:
    return [[torch.tensor(values, dtype=torch.float64)]]


@pytest.mark.parametrize(
    ("truth", "before", "after", "good", "words"),
    [
        (wide(1.0, 2.0), half(1.0, nan), half(1.0, 2.0), True, "agrees with float64, to 0.0e+00"),
        (
            wide(1.0, 2.0),
            half(1.0, nan),
            half(1.0, 1.0),
            False,
            "moves 1 of 2 elements that float64 gives as finite: 2",
        ),
        (
            wide(1.0, nan),
            half(1.0, nan),
            half(1.0, 0.0),
            True,
            "agrees with float64, to 0.0e+00 of the largest value; f",
        ),
        (wide(1.0, nan), half(1.0, nan), half(1.0, nan), False, "agrees with float64"),
        (wide(1.0, 2.0), half(3.0, nan), half(3.0, 2.0), True, "agrees with float64, to 1.0e+00"),
        (wide(nan, inf), half(nan, inf), half(1.0, 1.0), True, "float64 gives no finite value either"),
    ],
)
def test_a_change_is_judged_by_float64(
    truth: list[list[Tensor]], before: list[list[Tensor]], after: list[list[Tensor]], good: bool, words: str
) -> None:
    """An element that is what it was is not moved; one that float64 cannot compute either may be any number."""
    found = against(truth, before, after)
    assert found is not None
    assert str(found).startswith(words)
    assert found.is_good == good


def test_values_of_another_shape_are_not_compared() -> None:
    """Nor are whole numbers, or nothing at all."""
    assert against(wide(1.0), half(1.0), half(1.0, 2.0)) is None
    numbers = [[torch.tensor([1])]]
    assert against(numbers, numbers, numbers) is None
    assert against([], [], []) is None


def test_float64_undoes_casts() -> None:
    """Also a cast by name or by method; the result is what the formula gives in float64."""
    x = torch.tensor([1e-3], dtype=torch.float16)
    with torch.no_grad(), Float64():
        made = (x.half() * torch.ones(1, dtype=torch.bfloat16)).to(torch.float16).float().square()
    assert made.dtype is torch.float64
    assert made.item() == float(x.double()) ** 2


def test_the_first_is_evaluated_in_float64_and_what_raises_has_no_values() -> None:
    """Gradients of the others are looked at: the root of zero has none that is finite."""
    x = torch.zeros(2, requires_grad=True)

    def root() -> tuple[Tensor, Tensor]:
        return x.sqrt(), x

    def fails() -> tuple[Tensor, Tensor]:
        raise RuntimeError

    first, second, third = evaluated([root, root, fails])
    assert first.values[0].dtype is torch.float64
    assert second.values[0].dtype is torch.float32
    assert (first.has_finite_gradient, second.has_finite_gradient, third.values) == (True, False, [])
