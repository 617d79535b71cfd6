"""The fields of records as columns."""

import json
from typing import NamedTuple

import pytest

from nanwatch.numerics.formats import AbsRange
from nanwatch.records import reading
from nanwatch.records.fields import Fields
from nanwatch.records.record import Role


class WithMedian(NamedTuple):
    """A record as it would be with one line more."""

    label: str
    role: Role
    shape: tuple[int, ...] | None
    ends: AbsRange | None = None
    median: float | None = None


@pytest.mark.parametrize("median", [None, 2.5])
def test_a_field_more_has_a_column_and_a_member_of_json(median: float | None) -> None:
    """Nothing but its line says that there is one."""
    fields, row = Fields(WithMedian), WithMedian("weight", "weight", (2, 3), None, median)
    assert [(one.name, one.kind, one.may_be_null) for one in fields.columns][-1] == (
        "median",
        "float64",
        True,
    )
    columns = {one.name: list(one.cells([getattr(row, one.field)])) for one in fields.columns}
    assert (columns["shape"], columns["abs_max"]) == (["[2, 3]"], [None])
    assert fields.read({name: cells[0] for name, cells in columns.items()}) == row
    assert reading.read(WithMedian, json.loads(json.dumps(reading.plain(row))), "row") == row
