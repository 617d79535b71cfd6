"""Records, notes and frames: what is a fault, and the role of an event."""

import pytest

from nanwatch.records.record import NOTE_KINDS, Note, NoteKind, Record, event_frame


def record(isfinite: bool | None, kind: NoteKind | None = None) -> Record:
    return Record("output", "output", (1,), "float32", 0.0, 1.0, isfinite, None, kind and Note(kind))


@pytest.mark.parametrize("kind", NOTE_KINDS)
def test_only_what_is_meant_or_not_taken_is_no_fault(kind: NoteKind) -> None:
    record = Record("output", "output", (1,), "float32", 0.0, 1.0, False, None, Note(kind))
    assert record.is_fault == (kind not in ("mask", "allowed", "skipped_step", "not_taken"))


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
    frame = event_frame(4, "fc", label, "Linear", Note("spike", "words"))
    assert (frame.batch, frame.name, frame.class_name, frame.phase) == (4, "fc", "Linear", "step")
    (row,) = frame.records
    assert (row.role, row.label, row.abs_max, row.isfinite) == (role, label, None, None)
