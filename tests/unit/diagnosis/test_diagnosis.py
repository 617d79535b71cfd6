"""diagnosis.describe: what its words say is what is there, element for element."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from nanwatch.diagnosis import diagnosis
from nanwatch.diagnosis.diagnosis import describe
from support.oracle import values_of
from support.strategies import views

INF, NAN = math.inf, math.nan
ALL = slice(None)


def at(shape: tuple[int, ...], *places: object, value: float = NAN) -> torch.Tensor:
    """Zeros, with the value at each of the places."""
    x = torch.zeros(shape)
    for place in places:
        x[place] = value
    return x


def where(mask: torch.Tensor) -> torch.Tensor:
    """Zeros, with nan where the mask is."""
    return torch.zeros(mask.shape).masked_fill(mask.bool(), NAN)


ONES = torch.ones(2, 4, 4)

LITERAL = {
    "none": torch.zeros(3),
    "all": torch.full((2, 3), NAN),
    "one element": at((4, 4), (1, 2)),
    "indices 1 to 2": at((5,), slice(1, 3)),
    "2 of 5 indices": at((5,), [0, 3]),
    "1 of 4 rows, row 1": at((4, 3), 1),
    "1 of 4 rows, the last": at((4, 3), 3),
    "rows 1 to 2": at((4, 3), 1, 2),
    "column 1": at((4, 3), (ALL, 1)),
    "the last column": at((4, 3), (ALL, 2)),
    "3 of 8 columns": at((2, 8), (ALL, [0, 1, 5])),
    "1 of 64 rows, [3, 12, :]": at((4, 16, 5), (3, 12)),
    "index 3 of dimension 0, everywhere": at((4, 16, 5), 3),
    "index 17 of dimension 1, everywhere": at((2, 20, 3, 3), (ALL, 17)),
    "indices 3 to 4 of dimension 2, everywhere": at((2, 3, 6), (..., slice(3, 5))),
    "the block [1, 2:, 4:7]": at((2, 4, 8), (1, slice(2, None), slice(4, 7))),
    "2 of 6 rows": at((2, 3, 4), (0, 1), (1, 2)),
    "above the diagonal": where(ONES.triu(1)),
    "scattered over 3 of 4 rows": at((4, 4), (0, 0), (1, 3), (2, 2)),
    "scattered in the block [:, 5:8]": at((3, 9), (0, 5), (1, 6), (2, 7)),
    "scattered": at((2, 3), (0, 0), (1, 2), (1, 0)),
}


@pytest.mark.parametrize("words", LITERAL)
def test_words(words: str) -> None:
    """Each phrase once, of damage made by hand."""
    assert describe(LITERAL[words]) == words


def axis_indices(words: str, size: int) -> list[list[int]]:
    """The sets of indices that words such as `rows 2 to 5` may stand for; several where only a number is said."""
    numbers = [int(n) for n in re.findall(r"\d+", words)]
    if words.startswith("the last"):
        return [[size - 1]]
    if " of " in words:
        assert numbers[1] == size
        return [list(one) for one in itertools.combinations(range(size), numbers[0])]
    return [list(range(numbers[0], numbers[-1] + 1))]


def selected(shape: tuple[int, ...], index: str) -> NDArray[np.bool_]:
    """Return the elements that an index in brackets selects, as numpy reads it."""
    mask = np.zeros(shape, bool)
    mask[eval(f"np.s_[{index}]", {"np": np})] = True
    return mask


def crossing(shape: tuple[int, ...], chosen: dict[int, list[int]]) -> NDArray[np.bool_]:
    """All elements whose index is among those chosen, in each of the dimensions named."""
    mask = np.ones(shape, bool)
    for dim, indices in chosen.items():
        along = np.isin(np.arange(shape[dim]), indices)
        mask &= along.reshape([-1 if one == dim else 1 for one in range(len(shape))])
    return mask


def holds(words: str, bad: NDArray[np.bool_]) -> bool:
    """Return whether the words are true of the damage, read as a person would."""
    shape = bad.shape
    if words in ("none", "all", "one element"):
        return {"none": not bad.any(), "all": bool(bad.all()), "one element": bad.sum() == 1}[words]
    if words == "scattered":
        return bool(bad.any())
    if match := re.fullmatch(r"(?:scattered in )?the block \[(.*)\]", words):
        mask = selected(shape, match[1])
        return not (bad & ~mask).any() if words.startswith("scattered") else bool((bad == mask).all())
    if match := re.fullmatch(r"scattered over (\d+) of (\d+) rows", words):
        rows = bad.reshape(-1, shape[-1])
        return (rows.any(1).sum(), len(rows)) == (int(match[1]), int(match[2]))
    if match := re.fullmatch(r"1 of (\d+) rows, (.*)", words):
        if match[2].startswith("["):
            mask = selected(shape, match[2][1:-1])
        else:
            mask = crossing(shape, {0: axis_indices(match[2], shape[0])[0]})
        return math.prod(shape[:-1]) == int(match[1]) and bool((bad == mask).all())
    if words == "above the diagonal":
        row, column = np.indices(shape[-2:])
        return bool((bad == (row < column)).all())
    if (match := re.fullmatch(r"(\d+) of (\d+) rows", words)) and len(shape) > 2:
        rows = bad.reshape(int(match[2]), shape[-1])
        return bool((rows.any(1) == rows.all(1)).all()) and rows.any(1).sum() == int(match[1])
    if "dimension" in words:
        parts = re.findall(r"((?:ind|\d).*?) of dimension (\d+)", words.removesuffix(", everywhere"))
        dims = [int(dim) for _, dim in parts]
    else:
        parts, dims = [(words, "")], [1 if "column" in words else 0]
    sets = [axis_indices(part, shape[dim]) for (part, _), dim in zip(parts, dims, strict=True)]
    # Where the words give a number only, one of the sets of that many has to be it.
    return any(
        bool((bad == crossing(shape, dict(zip(dims, chosen, strict=True)))).all())
        for chosen in itertools.product(*sets)
    )


@st.composite
def damaged(draw: st.DrawFn) -> NDArray[np.bool_]:
    """Damage of a small shape: by chance, at the crossings of chosen indices, whole rows, or one side of a diagonal."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["chance", "crossing", "slices", "diagonal"]))
    if kind == "crossing":
        sets = {dim: draw(st.sets(st.integers(0, size - 1), min_size=1)) for dim, size in enumerate(shape)}
        return crossing(shape, {dim: sorted(one) for dim, one in sets.items()})
    if kind == "slices" and len(shape) > 1:
        over = draw(st.integers(1, len(shape) - 1))
        hit = seed.random(shape[:-over]) < 0.4
        return np.broadcast_to(hit.reshape(hit.shape + (1,) * over), shape).copy()
    if kind == "diagonal" and len(shape) > 1:
        return np.broadcast_to(np.tri(*shape[-2:], draw(st.integers(-1, 1)), bool), shape) ^ draw(
            st.booleans()
        )
    return seed.random(shape) < draw(st.sampled_from([0.1, 0.5, 0.9]))


@given(damaged(), st.sampled_from([NAN, INF, -INF]))
def test_the_words_are_true(bad: NDArray[np.bool_], value: float) -> None:
    """Read by a second program, the words give back the damage: exactly, or its number where only that is said."""
    x = torch.zeros(bad.shape).masked_fill(torch.from_numpy(np.array(bad)), value)
    words = describe(x)
    assert holds(words, bad), words


@given(damaged())
def test_damage_with_a_name_is_not_called_scattered(bad: NDArray[np.bool_]) -> None:
    """Damage that is all of a block, all of some indices of one dimension, or whole rows, is said to be."""
    indices = [sorted(set(one.tolist())) for one in np.nonzero(np.atleast_1d(bad))]
    part = [one for one, size in zip(indices, np.atleast_1d(bad).shape, strict=True) if len(one) < size]
    is_block = all(one[-1] - one[0] + 1 == len(one) for one in part if one)
    named = not bad.any() or (bad.sum() == math.prod(map(len, indices)) and (len(part) < 2 or is_block))
    rows = bad.reshape(-1, bad.shape[-1]) if bad.ndim > 1 else None
    named = named or (rows is not None and bool((rows.any(1) == rows.all(1)).all()))
    words = describe(torch.zeros(bad.shape).masked_fill(torch.from_numpy(np.array(bad)), NAN))
    assert ("scattered" not in words) or not named


@given(views())
def test_every_dtype_and_view(x: torch.Tensor) -> None:
    """Any dtype and any strides are described as the values that numpy reads out of their bits."""
    finite = np.isfinite(values_of(x)).reshape(tuple(x.shape))
    assert describe(x) == describe(where(torch.from_numpy(np.asarray(~finite))))


@pytest.mark.parametrize("bad", [complex(NAN, 0), complex(0, NAN), complex(INF, 1), complex(1, -INF)])
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_complex(bad: complex, dtype: torch.dtype) -> None:
    """A complex element is bad when either of its parts is; one whose modulus alone overflows is not."""
    large = torch.finfo(dtype).max
    x = torch.tensor([[1, complex(large, large)], [bad, bad]], dtype=torch.complex128).to(dtype)
    assert describe(x) == "1 of 2 rows, the last"


def test_the_mask_is_made_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of many chunks has the words of the same tensor in one."""
    torch.manual_seed(0)
    tensors = [
        torch.rand(6, 7, 5).log2().floor().masked_fill_(torch.rand(6, 1, 5) < 0.1, NAN) for _ in range(20)
    ]
    at_once = [describe(x.transpose(0, 2)) for x in tensors]
    monkeypatch.setattr(diagnosis, "_CHUNK", 4)
    assert [describe(x.transpose(0, 2)) for x in tensors] == at_once


def test_what_cannot_be_told() -> None:
    """Nothing is said of tensors that are too large, have no values or no strides."""
    x = torch.full((4,), NAN)
    with FakeTensorMode():
        fake = torch.ones(3)
    for other in (
        x.to("meta"),
        fake,
        x.to_sparse(),
        torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
    ):
        assert describe(other) == ""
    assert (describe(x, max_elements=3), describe(x, max_elements=4)) == ("", "all")


def test_modes_do_not_see_it() -> None:
    """The user's function modes are not asked, and gradients and versions stay as they are."""

    class Refuses(TorchFunctionMode):
        def __torch_function__(
            self, func: object, types: object, args: object = (), kwargs: object = None
        ) -> None:
            raise AssertionError(func)

    x = torch.full((2,), NAN, requires_grad=True)
    version = x._version
    with Refuses():
        words = describe(x)
    assert (words, x._version, x.grad) == ("all", version, None)
