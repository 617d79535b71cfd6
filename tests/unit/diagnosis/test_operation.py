"""operation.StorageWriteLog against an array that holds, for every element, who wrote it last."""

from __future__ import annotations

import gc
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from nanwatch.diagnosis import operation
from nanwatch.diagnosis.operation import StorageWriteLog

NAN = math.nan
ROWS, COLUMNS = 4, 5

slices = st.builds(
    slice, st.integers(0, 3), st.integers(1, 5), st.sampled_from([None, 2])
)  # some of them select nothing
places = st.tuples(slices, slices)


@given(st.lists(st.tuples(places, st.booleans()), max_size=12), places, st.booleans())
def test_the_last_writers_of_the_bad_elements(
    history: list[tuple[Any, bool]], asked: Any, transposed: bool
) -> None:
    """After any number of writes to parts of a tensor, some bad: those who wrote last what is bad in a part of it."""
    x = torch.zeros(ROWS, COLUMNS)
    last = np.full((ROWS, COLUMNS), -1)
    table: StorageWriteLog[int] = StorageWriteLog()
    for number, (place, bad) in enumerate(history):
        x[place] = NAN if bad else 1.0
        last[place] = number if bad else -1
        table.put(x[place], number if bad else None)
    view = x.t()[asked[::-1]] if transposed else x[asked]
    expected = sorted(set(last[asked].flatten().tolist()) - {-1})
    # A finite tensor is not looked up.
    assert not expected or table.find(view) == expected


def test_another_dtype_of_the_same_bytes() -> None:
    """A write is found through a view of another dtype, by its bytes."""
    x = torch.zeros(8)
    table: StorageWriteLog[str] = StorageWriteLog()
    for i, name in ((1, "first"), (3, "second")):
        x[i] = NAN
        table.put(x[i], name)
    halves = x.view(torch.float16)
    assert table.find(halves) == ["first", "second"]
    assert table.find(halves[:5]) == ["first"]
    assert table.find(halves[5:]) == ["second"]


def test_expanded_tensors() -> None:
    """Elements that share their memory are one."""
    x = torch.zeros(3)
    table: StorageWriteLog[str] = StorageWriteLog()
    for i, name in ((0, "first"), (2, "second")):
        x[i] = NAN
        table.put(x[i : i + 1].expand(4), name)
    assert table.find(x.expand(5, 3)) == ["first", "second"]
    assert table.find(x.expand(5, 3)[:, 1:]) == ["second"]


def test_an_address_that_is_given_away_again() -> None:
    """Facts about a freed storage are not attributed to another, and keep no memory alive."""
    table: StorageWriteLog[int] = StorageWriteLog()
    for number in range(200):
        x = torch.full((1000,), NAN)
        assert table.find(x) == []
        table.put(x, number)
        alive = StorageWeakRef(x.untyped_storage())
        del x
        assert alive.expired()


def test_tensors_without_addresses() -> None:
    """A sparse tensor is known by itself, for as long as it lives."""
    table: StorageWriteLog[int] = StorageWriteLog()
    for number in range(50):
        x = torch.full((3,), NAN).to_sparse()
        assert table.find(x) == []
        assert x not in table
        table.put(x, number)
        assert (table.find(x), x in table) == ([number], True)
        table.put(x, number + 1)
        assert table.find(x) == [number + 1]
        del x
        gc.collect(0)


def test_the_table_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of storages that are gone are thrown out."""
    monkeypatch.setattr(operation, "_MANY", 10)
    table: StorageWriteLog[int] = StorageWriteLog()
    kept = torch.full((2,), NAN)
    table.put(kept, 0)
    for number in range(100):
        table.put(torch.full((2,), NAN), number)
    assert len(table._places) <= 10
    assert table.find(kept) == [0]
