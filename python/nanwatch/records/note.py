"""Notes of records: why a value has no range, that an infinity is meant, or which part of a tensor was read.

A note is a kind and what belongs to it. `str()` makes English of it, for reports.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, TypeAlias, get_args

from .fields import Cell

NoteKind: TypeAlias = Literal[
    "absent", "not_a_tensor", "not_checked", "local_shard", "mask", "allowed", "skipped_step", "not_taken",
    "spike", "forecast",
]  # fmt: skip
NOTE_KINDS: tuple[NoteKind, ...] = get_args(NoteKind)
# These say that a non-finite value is meant.
EXCUSES: tuple[NoteKind, ...] = ("mask", "allowed", "skipped_step", "not_taken")
# These say what was reported in a batch, in records that `event_frame` makes.
EVENTS: tuple[NoteKind, ...] = ("spike", "forecast")

# Texts of "not_checked": where a CUDA graph was captured, and where the bytes of a batch were used up.
CAPTURED = "in a CUDA graph capture"
NOT_READ_YET = "not read yet"

# English of each kind, alone and with what belongs to it.
_WORDS: dict[NoteKind, tuple[str, str]] = {
    "absent": ("None", ""),
    "not_a_tensor": ("not a tensor", ""),
    "not_checked": ("not checked", "not checked: {}"),
    "local_shard": ("local shard", "local shard: {}"),
    "mask": ("mask", ""),
    "allowed": ("allowed", ""),
    "skipped_step": ("skipped step", "skipped step ({})"),
    "not_taken": ("not in the step's gradients", ""),
    "spike": ("spike", "{}"),
    "forecast": ("forecast", "forecast: {}"),
}


class Note(NamedTuple):
    """A kind of note with its text or its placement, such as `Shard(dim=0) at dp=1 of 4, Replicate() at tp=0 of 2`.

    | kind | of | with |
    |---|---|---|
    | absent | the value None | |
    | not_a_tensor | a value that is no tensor | |
    | not_checked | a tensor that was not read | the reason |
    | local_shard | a DTensor, of which this process's part was read | its placement in the device mesh, if known |
    | mask | an additive mask, whose -inf is meant | |
    | allowed | a value that is meant, as `allow` says | |
    | skipped_step | a gradient that no optimizer's step took | the scale: `scale 65536 → 32768` |
    | not_taken | a gradient that never reached those of the step | |
    | spike, forecast | no tensor, but what was reported of one | its line |
    """

    kind: Annotated[NoteKind, Cell(name="note")]
    text: Annotated[str, Cell(name="note_text", is_null_if_empty=True)] = ""
    placement: str | None = None

    def __str__(self) -> str:
        alone, more = _WORDS[self.kind]
        words = self.placement or self.text
        return more.format(words) if words else alone


# The note of a tensor that is a mask wherever it goes. CallRecorder knows it by its identity.
PLAIN_MASK = Note("mask")
