"""Records and frames: what is a fault, and the role of an event."""

from __future__ import annotations

import pytest

from nanwatch.records.note import EXCUSES, Note, NoteKind
from nanwatch.records.record import Frame, Record, event_frame


def record(isfinite: bool | None, kind: NoteKind | None = None) -> Record:
    return Record("output", "output", (1,), "float32", 0.0, 1.0, isfinite, None, kind and Note(kind))


@pytest.mark.parametrize("kind", [None, "local_shard", "mask", "allowed", "skipped_step", "not_taken"])
def test_a_fault_is_what_nobody_means(kind: NoteKind | None) -> None:
    """A note that excuses a value does so only for non-finite ones; a shard's excuses nothing."""
    assert record(False, kind).is_fault == (kind not in EXCUSES)
    assert not record(True, kind).is_fault
    assert not record(None, kind).is_fault
    assert record(False, kind).is_shard == (kind == "local_shard")


def test_the_fault_of_a_frame_is_its_first() -> None:
    """Records before it, finite or meant, are passed over."""
    rows = (record(True), record(False, "mask"), record(False), record(False, "local_shard"))
    assert Frame(0, "m", "M", rows).fault is rows[2]
    assert Frame(0, "m", "M", rows[:2]).fault is None


def test_the_ends_are_those_of_the_format() -> None:
    """As IEEE 754 has them for half precision; an integer has none."""
    ends = record(True)._replace(dtype="float16").ends
    assert ends == (65504.0, 2.0**-14, 2.0**-24)
    assert record(True)._replace(dtype="int64").ends is None


@pytest.mark.parametrize(
    ("label", "role"),
    [
        ("weight.grad", "gradient"),
        ("gradients", "gradient"),
        ("input[0]", "input"),
        ("output.logits", "output"),
        ("loss", "output"),
        ("attention logits of head 3", "output"),
        ("exp_avg of weight", "weight"),
    ],
)
def test_an_event_has_the_role_of_its_label(label: str, role: str) -> None:
    """Its frame is of a step, without a range."""
    frame = event_frame(4, "fc", label, "Linear", Note("spike", "words"))
    assert (frame.batch, frame.name, frame.class_name, frame.phase) == (4, "fc", "Linear", "step")
    (row,) = frame.records
    assert (row.role, row.label, row.abs_max, row.isfinite) == (role, label, None, None)
