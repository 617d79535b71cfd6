"""Notes: which excuse a value, and the placement of a shard."""

from __future__ import annotations

import pytest

from nanwatch.records.note import (
    EVENTS,
    EXCUSES,
    NOTE_KINDS,
    Note,
    NoteKind,
)
from nanwatch.records.record import Record


@pytest.mark.parametrize("kind", NOTE_KINDS)
def test_only_an_excuse_makes_a_nonfinite_value_no_fault(kind: NoteKind) -> None:
    """An event has no range, so that it is none."""
    record = Record("weight", "weight", (32,), "float32", 0.0, 1.0, False, None, Note(kind))
    assert record.is_fault == (kind not in EXCUSES)
    assert not set(EXCUSES) & set(EVENTS)
