"""Alignment of calls: what was added, taken out, moved, swapped or renamed leaves the rest in its place."""

from __future__ import annotations

import random
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from nanwatch.trace.align import Rows, _common, align, align_calls


def aligned(a: list[str], b: list[str]) -> list[tuple[int, int]]:
    """The pairs of calls `name:Class`, by name and class, by class, and by name."""
    keys = [[(spec, spec.partition(":")[2], spec.partition(":")[0]) for spec in specs] for specs in (a, b)]
    return align_calls([([key[i] for key in keys[0]], [key[i] for key in keys[1]]) for i in range(3)])


def words(a: list[str], b: list[str]) -> list[tuple[str, str]]:
    return [(a[i], b[j]) for i, j in aligned(a, b)]


def test_an_inserted_module_is_passed_over() -> None:
    """All others answer to themselves."""
    a = ["0:Linear", "1:ReLU", "2:Linear", ":Net"]
    b = ["0:Linear", "extra:Norm", "1:ReLU", "2:Linear", ":Net"]
    assert words(a, b) == [(one, one) for one in a]
    assert words(b, a) == [(one, one) for one in a]


def test_a_module_put_into_a_sequential_renames_those_behind_it() -> None:
    """They are found by their class."""
    a = ["0:Linear", "1:ReLU", "2:Linear", ":Net"]
    b = ["0:Linear", "1:ReLU", "2:Dropout", "3:Linear", ":Net"]
    assert words(a, b) == [(a[0], b[0]), (a[1], b[1]), (a[2], b[3]), (a[3], b[4])]


def test_a_swapped_module_answers_to_the_one_of_its_name() -> None:
    """Also where its class has other rows."""
    a = ["fc:Linear", "act:GELU", "proj:Linear", ":Net"]
    b = ["fc:Linear", "act:ReLU", "proj:Linear", ":Net"]
    assert words(a, b) == list(zip(a, b, strict=True))
    b = ["fc:Linear", "act:Norm", "proj:Linear", ":Net"]
    assert words(a, b) == list(zip(a, b, strict=True))


def test_a_call_left_out_of_a_shared_module_is_found_by_its_neighbours() -> None:
    """When the second of a block's three calls is missing, the third is matched with the third."""
    a = ["x:Linear", "s:Norm", "y:Linear", "s:Norm", "z:Linear", "s:Norm", ":Net"]
    b = ["x:Linear", "s:Norm", "z:Linear", "s:Norm", ":Net"]
    assert aligned(a, b) == [(0, 0), (1, 1), (4, 2), (5, 3), (6, 4)]


def test_moved_modules_answer_to_themselves() -> None:
    """Two modules that changed places."""
    a, b = ["p:Linear", "q:Norm", ":Net"], ["q:Norm", "p:Linear", ":Net"]
    assert set(words(a, b)) == {(one, one) for one in a}


@given(st.lists(st.integers(0, 30), max_size=40), st.lists(st.integers(0, 30), max_size=40))
def test_what_is_common_is_equal_and_in_order(a: list[int], b: list[int]) -> None:
    """A subsequence of both, and of a sequence with itself all of it."""
    found = _common(a, b)
    assert all(a[i] == b[j] for i, j in found)
    assert all(x[0] < y[0] and x[1] < y[1] for x, y in pairwise(found))
    assert _common(a, a) == [(i, i) for i in range(len(a))]
    if set(a) & set(b):
        assert found


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=40), st.randoms())
def test_deletions_alone_are_found_exactly(a: list[int], rng: random.Random) -> None:
    """With some of a sequence of different things left out, each that is left answers to itself."""
    kept = [i for i in range(len(a)) if rng.random() < 0.6]
    assert _common(a, [a[i] for i in kept]) == [(i, j) for j, i in enumerate(kept)]


def test_long_sequences_of_one_call_end() -> None:
    """Tens of thousands of calls of one module, of which one side has one more, take no quadratic time."""
    a = [1, 2] * 20_000
    found = _common(a, [*a[:20_001], 3, *a[20_001:]])
    assert len(found) == len(a)


def column(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12),
)
def test_rows_that_answer_to_each_other_have_the_same_record(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    """Random calls with random records, two batches: pairs are of one record, of the wanted batches, each row once."""

    def rows(made: list[tuple[int, int]]) -> Rows:
        batch, call, module, record = [], [], [], []
        for number in range(2):
            for at, (name, more) in enumerate(made if number == 0 else made[::-1]):
                for label in range(1 + more):
                    batch.append(number)
                    call.append(at)
                    module.append(name)
                    record.append(label)
        again = [0] * len(batch)
        return Rows(*map(column, (batch, call, module, module, again, record)))

    a, b = rows(first), rows(second)
    in_a, in_b = align(a, b, [(0, 1), (1, 0)])
    assert (a.record[in_a] == b.record[in_b]).all()
    assert (a.batch[in_a] == 1 - b.batch[in_b]).all()
    assert len(set(in_a.tolist())) == len(in_a)
    assert len(set(in_b.tolist())) == len(in_b)
    same_a, same_b = align(a, a, [(0, 0), (1, 1)])
    assert (same_a == np.arange(len(a.batch))).all()
    assert (same_b == same_a).all()
