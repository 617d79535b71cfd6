"""All text made of frames and findings: pure functions from structures to lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from ..records.record import EVENTS, Frame, Record, has_vanished, shrinking
from ..util.messages import first_few, visible
from .finding import Cure, Finding, first_seen
from .finding_text import explain

PREFIX = " " * 17
_MOST_SAMPLES = 8  # more are counted: a report is no list of a dataset
COLUMNS = f"{'abs min':8} {'abs max':8} metadata"


def record_line(record: Record) -> str:
    """Return the line of one record: `1.01e-06 6.44e+00 weight`, or a note over both columns of numbers."""
    note = record.note
    numbers, remark = " " * 17, str(note or "")
    if record.abs_min is not None and record.abs_max is not None:
        numbers = f"{record.abs_min:8.2e} {record.abs_max:8.2e}"
    elif note is not None and note.kind not in EVENTS:
        numbers, remark = f"{note._replace(text='')!s:>17}", note.text
    return visible(f"{numbers} {record.label}" + (f" ({remark})" if remark else ""))


def frame_line(name: str, class_name: str) -> str:
    """Return the line that names the module of a frame."""
    return visible(f"{PREFIX} {name} {class_name}")


def frame_words(frame: Frame) -> list[str]:
    """Return the words that follow the name of a frame: its phase, unless it is a forward, and `recomputed`."""
    return [frame.phase] * (frame.phase != "forward") + ["recomputed"] * frame.recomputed


def batch_lines(batch: int) -> list[str]:
    """Return the header above the first frame of a batch."""
    return [f"\n\n{PREFIX} *** Starting batch number={batch} ***", COLUMNS]


def summary(finding: Finding) -> str:
    """Return one sentence: what, in which tensor of which module, in which batch, after how many steps."""
    count, rank = finding.num_steps, f" on rank {finding.rank}" if finding.rank else ""
    steps = f" (after {count:,} optimizer step{'' if count == 1 else 's'})" if count else ""
    return visible(f"{first_seen(finding)}{rank}{steps}")


class Fact(NamedTuple):
    """One line of a report: its head, such as "Where", and what it says."""

    head: str
    body: str

    def __str__(self) -> str:
        return f"{self.head + ':':<6} {self.body}"


def finding_facts(finding: Finding, frames: Sequence[Frame]) -> list[Fact]:
    """Return what happened, where, why, and what to look at next."""
    frame, record = culprit(finding, frames)
    explanation = explain(finding, frame, record, frames)
    facts = [
        Fact("What", f"{summary(finding)}."),
        Fact("Where", f"{_where(finding, record)}."),
        Fact("Why", str(explanation.reason)),
        Fact("Loss", _losses(finding.losses)),
        Fact("Room", shrinking(frames)),
        *(Fact("Under", words) for words in _vanished(frame)),
        *_by(finding),
        Fact("Data", _samples(finding.samples)),
        *(Fact("Cure", str(cure)) for cure in finding.cures),
        Fact("Next", str(explanation.advice)),
        *(Fact("Note", f"{remark}.") for remark in finding.remarks),
        *(Fact("File", path) for path in finding.files),
    ]
    return [fact for fact in facts if fact.body]


def finding_lines(finding: Finding, frames: Sequence[Frame]) -> list[str]:
    """Return the facts of a finding as lines of text, each cure with the lines of source that it changes."""
    cures = iter(finding.cures)
    lines = []
    for fact in finding_facts(finding, frames):
        lines += [str(fact), *(changed_lines(next(cures)) if fact.head == "Cure" else ())]
    return lines


def _by(finding: Finding) -> list[Fact]:
    if finding.transient:
        words = (
            "something that did not come again: the batch, run once more with the same inputs and random numbers, was"
            " finite. A race, a kernel that is not deterministic, memory that was never written, hardware, or a state"
            " that the model keeps in attributes or buffers."
        )
        return [Fact("By", words)]
    # The record may show a later value: inf minus inf is nan.
    made = f" made {finding.made}" if finding.made is not None and finding.made not in finding.value else ""
    # An operation that only hands on the data is not where they went bad.
    is_passed = finding.origin == "data" and any(x.isfinite is False for x in finding.operands)
    if finding.operation is None or (is_passed and not made):
        return []
    by = finding.operation.removeprefix("the step of ")
    head = "By" if by == finding.operation else "Step"
    where = "" if finding.place is None else f" at {finding.place.short}"
    read = (x for x in finding.operands if x.abs_min is not None and x.abs_max is not None)
    words = ", ".join(
        f"|{x.label}| {_range(x)} ({', '.join((f'{x.dtype} {list(x.shape or ())}', *small_words(x)))})"
        for x in read
    )
    return [Fact(head, f"{by}{made}{where}."), Fact("From", f"{words}." if words else "")]


def _range(record: Record) -> str:
    if record.shape and 0 in record.shape:
        return "empty"
    return f"{record.abs_min:.2e} to {record.abs_max:.2e}".replace("nan to nan", "nan")


def _losses(losses: Sequence[float]) -> str:
    if not losses:
        return ""
    rise = f"each of the latest {len(losses)} was larger than the one before"
    return f"it diverges: {rise}, from {losses[0]:.3g} to {losses[-1]:.3g}."


def _samples(samples: Sequence[int]) -> str:
    if len(samples) == 1:
        return f"sample {samples[0]} of the batch carries it; without it: finite."
    named = first_few([*map(str, samples)], _MOST_SAMPLES)
    return f"samples {named} of the batch carry it; without them: finite." if samples else ""


def small_words(record: Record) -> list[str]:
    """Return how many elements are zero and how many subnormal, where that was counted and some are."""
    health = record.health
    counts = () if health is None else ((health.num_zero, "zero"), (health.num_subnormal, "subnormal"))
    return [f"{count:,} {word}" for count, word in counts if count]


def _vanished(frame: Frame | None) -> Iterator[str]:
    for record in () if frame is None else frame.records:
        if record.role in ("input", "gradient") and has_vanished(record) and (ends := record.ends):
            below = f"below {ends.smallest_normal:.2e}, the smallest normal number of {record.dtype}."
            yield f"all of `{record.label}` is {below if record.abs_max else 'zero.'}"


def culprit(finding: Finding, frames: Sequence[Frame]) -> tuple[Frame | None, Record | None]:
    """Return the frame and the record of the finding, as far as they are among `frames`."""
    for frame in frames:
        if (frame.name, frame.batch, frame.phase) == (finding.module, finding.batch, finding.phase):
            record = frame.fault
            if record is not None and record.label == finding.label:
                return frame, record
    return None, None


def _where(finding: Finding, record: Record | None) -> str:
    if finding.num_nonfinite is None:
        where = f"some of {finding.numel:,} elements, not counted"
    elif finding.num_nonfinite == finding.numel:
        where = "the only element" if finding.numel == 1 else f"all {finding.numel:,} elements"
    else:
        where = f"{finding.num_nonfinite:,} of {finding.numel:,} elements"
    if finding.extent and finding.extent not in ("all", "one element"):
        where += f" ({finding.extent})"
    if finding.index and finding.num_nonfinite != finding.numel:
        where += f", the first at {list(finding.index)}"
    if record is None or record.shape is None:
        return where
    if not record.is_shard:
        return f"{where}; {record.dtype} of shape {list(record.shape)}"
    return f"{where}; the {record.note} of {record.dtype} of shape {list(record.shape)}"


# Parts of a patch: its head, and lines that stay, go and come.
Kind: TypeAlias = Literal["head", "same", "old", "new"]
_KINDS: dict[str, Kind] = {"-": "old", "+": "new", " ": "same"}


def patch_lines(cure: Cure) -> list[tuple[Kind, str]]:
    """Return the lines of the patch, or of the code to write, each with its part in the change."""
    if not cure.patch:
        return [("new", f"+{line}") for line in _lines(cure.code)]
    lines: list[tuple[Kind, str]] = []
    is_hunk = False
    for line in _lines(cure.patch):
        # The header has lines with the same signs.
        is_hunk = line.startswith("@@") or (is_hunk and not line.startswith(("diff ", "index ")))
        kind = _KINDS.get(line[:1], "head") if is_hunk else "head"
        lines.append((kind, line.expandtabs(4)))
    return lines


def changed_lines(cure: Cure) -> list[str]:
    """Return what the cure takes out and puts in, as lines of a text report."""
    changed = [line for kind, line in patch_lines(cure) if kind in ("old", "new")]
    code = _lines(textwrap.dedent("".join(f"{line[1:]}\n" for line in changed)))
    return [f"       {line[0]} {text}" for line, text in zip(changed, code, strict=True)]


def _lines(text: str) -> list[str]:
    # splitlines() would also end a line at characters that may stand in a string of the source, such as U+2028.
    return text.removesuffix("\n").split("\n") if text else []
