"""All text made of frames and findings: pure functions from structures to lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..numerics.formats import limits
from ..util.imports import needed
from ..util.visible import module_name, visible
from .cure_text import cure_lines
from .finding_text import next_backward, next_forward, samples_words, why_backward, why_forward
from .headroom import has_vanished, shrinking
from .record import NONE, NOT_A_TENSOR, NOT_CHECKED, SKIPPED_STEP, Record

if TYPE_CHECKING:
    from .finding import Finding
    from .record import Frame, Phase

PREFIX = " " * 17
COLUMNS = f"{'abs min':8} {'abs max':8} metadata"

_MOST_LINES = 39  # of a report with a finding: one screen
_HEADER = 3

Style: TypeAlias = Literal["plain", "head", "module", "quiet", "nonfinite"]
_RICH_STYLES: dict[Style, str] = {
    "plain": "",
    "head": "bold",
    "module": "cyan",
    "quiet": "dim",
    "nonfinite": "bold red",
}


def range_line(abs_min: float, abs_max: float, label: str) -> str:
    """Return `1.01e-06 6.44e+00 weight`."""
    return visible(f"{abs_min:8.2e} {abs_max:8.2e} {label}")


def note_line(note: str, label: str) -> str:
    """Return `None input[1]`, the note right-aligned over both columns of numbers."""
    return visible(f"{note:>17} {label}")


def record_line(record: Record) -> str:
    """Return the line of one record."""
    if record.abs_min is not None and record.abs_max is not None:
        line = range_line(record.abs_min, record.abs_max, record.label)
        return visible(f"{line} ({record.note})" if record.note else line)
    if record.note in (NONE, NOT_A_TENSOR):
        return note_line(record.note, record.label)
    reason = record.note.removeprefix(NOT_CHECKED).removeprefix(": ")
    return note_line(NOT_CHECKED, f"{record.label} ({reason})" if reason else record.label)


def frame_line(name: str, class_name: str) -> str:
    """Return the line that names the module of a frame."""
    return visible(f"{PREFIX} {name} {class_name}")


def frame_lines(frame: Frame) -> list[str]:
    """Return the frame's name and a line for each record."""
    return [frame_line(frame.name, frame.class_name) + _attributes(frame), *map(record_line, frame.records)]


def _attributes(frame: Frame) -> str:
    """Return ` (backward, recomputed)`, the words that follow the name of such a frame."""
    said = [frame.phase] * (frame.phase != "forward") + ["recomputed"] * frame.recomputed
    return f" ({', '.join(said)})" if said else ""


def batch_lines(batch: int) -> list[str]:
    """Return the header above the first frame of a batch."""
    return [f"\n\n{PREFIX} *** Starting batch number={batch} ***", COLUMNS]


_PHASES: dict[Phase, str] = {
    "forward": "",
    "backward": "the backward of ",
    "step": "the optimizer's step after ",
}


def summary(finding: Finding) -> str:
    """Return one sentence: what, in which tensor of which module, in which batch."""
    rank = f" on rank {finding.rank}" if finding.rank else ""
    return visible(
        f"{finding.value} first seen in `{finding.label}` of {module_name(finding.module)}"
        f" ({finding.class_name}) in {_PHASES[finding.phase]}batch {finding.batch}{rank}"
    )


def finding_lines(finding: Finding, frames: Sequence[Frame]) -> list[str]:
    """Return what happened, where, why, and what to look at next; one line each."""
    return list(map(visible, _finding_lines(finding, frames)))


def _finding_lines(finding: Finding, frames: Sequence[Frame]) -> list[str]:
    frame, record = _culprit(finding, frames)
    lines = [f"What:  {summary(finding)}.", f"Where: {_where(finding, record)}."]
    is_forward = finding.phase == "forward"
    why = why_forward(finding, frame, frames) if is_forward else why_backward(finding, frame)
    lines += [f"Why:   {why}"]
    if (shrunk := shrinking(frames)) is not None:
        lines.append(f"Room:  headroom in {shrunk.dtype} fell {shrunk}.")
    lines += [] if frame is None else _vanished(frame)
    lines += _by(finding)
    if finding.samples:
        lines.append(f"Data:  {samples_words(finding.samples)}")
    lines += [line for cure in finding.cures for line in cure_lines(cure)]
    following = (
        next_forward(finding, frame, record, frames) if is_forward else next_backward(finding, frame, record)
    )
    lines.append(f"Next:  {following}")
    lines += [f"Note:  {remark}." for remark in finding.remarks]
    lines += [f"File:  {path}" for path in finding.files]
    return lines


def _by(finding: Finding) -> list[str]:
    if finding.transient:
        return [
            "By:    something that did not come again: the batch, run once more with the same inputs and random"
            " numbers, was finite. A race, a kernel that is not deterministic, memory that was never written, hardware,"
            " or a state that the model keeps in attributes or buffers."
        ]
    if finding.operation is None:
        return []
    # The path in the report is whole; here what a person knows the file by.
    where = f" at {finding.source.rpartition('site-packages/')[2]}" if finding.source else ""
    # The record may show what became of it: inf minus inf is nan.
    made = f" made {finding.made}" if finding.made is not None and finding.made not in finding.value else ""
    given = [
        f"{one.label} {one.abs_min:.2e} to {one.abs_max:.2e} ({one.dtype} {list(one.shape or ())}{_small(one)})"
        for one in finding.operands
        if one.abs_min is not None and one.abs_max is not None
    ]
    return [f"By:    {finding.operation}{made}{where}."] + ([f"From:  {', '.join(given)}."] if given else [])


def _small(record: Record) -> str:
    """Return how many elements are zero or subnormal, where that was counted."""
    health = record.health
    counts = () if health is None else ((health.num_zero, "zero"), (health.num_subnormal, "subnormal"))
    return "".join(f", {count:,} {word}" for count, word in counts if count)


def _vanished(frame: Frame) -> list[str]:
    return [
        f"Under: all of `{record.label}` is "
        + (
            f"below {ends.smallest_normal:.2e}, the smallest normal number of {record.dtype}."
            if record.abs_max
            else "zero."
        )
        for record in frame.records
        if record.role in ("input", "gradient") and has_vanished(record) and (ends := limits(record.dtype))
    ]


def _culprit(finding: Finding, frames: Sequence[Frame]) -> tuple[Frame | None, Record | None]:
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
    if finding.extent:
        where += f" ({finding.extent})"
    if finding.index:
        where += f", the first at {list(finding.index)}"
    if record is None or record.shape is None:
        return where
    if not record.is_shard:
        return f"{where}; {record.dtype} of shape {list(record.shape)}"
    placement = record.placement
    whole = None if placement is None or not finding.index else placement.in_whole(finding.index)
    where += "" if whole is None else f" of the shard, {list(whole)} of the whole"
    return f"{where}; the {record.note} of {record.dtype} of shape {list(record.shape)}"


_MOST_NAMED = 5


def never_called_lines(names: Sequence[str]) -> list[str]:
    """Return the line that names modules which nobody called, if there are any."""
    if not names:
        return []
    named = [module_name(name) for name in names[:_MOST_NAMED]]
    more = f" and {len(names) - len(named):,} more" if len(names) > len(named) else ""
    return [
        f"Never called as modules, though their weights are trained: {', '.join(named)}{more}."
        " What they compute is seen only where a watched module receives it."
    ]


def mesh_coordinates(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Return `dp=1 of 4` for each dimension of the device meshes that sharded tensors of these frames are on."""
    placements = (record.placement for frame in frames for record in frame.records if record.is_shard)
    return tuple(dict.fromkeys(place.where for one in placements if one is not None for place in one.places))


def styled_lines(
    frames: Sequence[Frame],
    finding: Finding | None,
    batch: int | None,
    mesh: Sequence[str] = (),
    told: Sequence[str] = (),
    *,
    whole: bool = False,
) -> Iterator[tuple[Style, str]]:
    """Return the lines of a report, each with its style; `told` are the last of them.

    With a finding there are fewer than forty, unless it is `whole`: of the frames those closest to the finding.
    """
    return (
        (style, visible(line)) for style, line in _styled_lines(frames, finding, batch, mesh, told, whole)
    )


def _styled_lines(
    frames: Sequence[Frame],
    finding: Finding | None,
    batch: int | None,
    mesh: Sequence[str],
    told: Sequence[str],
    whole: bool,
) -> Iterator[tuple[Style, str]]:
    until = "" if batch is None else f" up to batch {batch}"
    if finding is not None:
        yield "head", f"Detected {finding.value} in batch {finding.batch}"
    elif not frames:
        yield "head", f"Nothing was looked at{until}: no watched call has run."
        return
    elif not any(record.isfinite is not None for frame in frames for record in frame.records):
        yield "head", f"Nothing could be read{until}: no record of the frames below has a range."
    else:
        skipped = {
            (frame.batch, record.note): None
            for frame in frames
            for record in frame.records
            if record.note.startswith(SKIPPED_STEP)
        }
        yield "head", f"All finite{until}" + (" but for gradients that no step took" if skipped else "")
        for number, note in skipped:
            yield "plain", f"Batch {number}: {note}."
    if mesh:
        yield "plain", f"This rank in the device mesh: {', '.join(mesh)}."
    source, culprit = (None, None) if finding is None else _culprit(finding, frames)
    ending = [] if finding is None else finding_lines(finding, frames)
    ending = [*[""] * bool(ending or told), *ending, *told]
    count = len(frames)
    if finding is not None and not whole:
        frames = _closest(frames, source, _MOST_LINES - _HEADER - bool(mesh) - len(ending))
    which = f"Last {count} frames" if len(frames) == count else f"{len(frames)} of the last {count} frames"
    yield "plain", f"{which}, the oldest first:"
    yield "quiet", COLUMNS
    previous = frames[0].batch if frames else None
    for frame in frames:
        if frame.batch != previous:
            yield "quiet", f"{PREFIX} *** Starting batch number={frame.batch} ***"
            previous = frame.batch
        yield "module", frame_line(frame.name, frame.class_name) + _attributes(frame)
        for record in frame.records:
            if finding is not None and record is culprit:
                yield "nonfinite", f"{record_line(record)}  <-- {finding.value}, first"
            else:
                yield ("quiet" if record.abs_max is None else "plain"), record_line(record)
    for line in ending:
        yield "plain", line


def _closest(frames: Sequence[Frame], source: Frame | None, room: int) -> Sequence[Frame]:
    """Return the frames up to `source`, then those behind it, of which so many lines can be shown; at least one."""
    last = next((i for i, frame in enumerate(frames) if frame is source), len(frames) - 1)
    first = last
    used = _height(frames, last) if frames else 0
    while first > 0 and (more := used + _height(frames, first - 1)) <= room:
        first, used = first - 1, more
    while last + 1 < len(frames) and (more := used + _height(frames, last + 1)) <= room:
        last, used = last + 1, more
    return frames[first : last + 1]


def _height(frames: Sequence[Frame], i: int) -> int:
    """Return how many lines the frame takes, with the line of its batch."""
    return 1 + len(frames[i].records) + (i + 1 < len(frames) and frames[i].batch != frames[i + 1].batch)


def report_text(
    frames: Sequence[Frame],
    finding: Finding | None,
    batch: int | None,
    mesh: Sequence[str] = (),
    told: Sequence[str] = (),
    *,
    color: bool = False,
    whole: bool = False,
) -> str:
    """Return the report as text, without a newline at its end; with ANSI colours for `color`. See styled_lines."""
    lines = list(styled_lines(frames, finding, batch, mesh, told, whole=whole))
    return _colored(lines) if color else "\n".join(line for _, line in lines)


def _colored(lines: Sequence[tuple[Style, str]]) -> str:
    instead = "leave color=False"
    console_kind = needed("rich.console", "color=True", "terminal", instead).Console
    styled = needed("rich.text", "color=True", "terminal", instead).Text
    width = max((len(line) for _, line in lines), default=0) + 1
    console = console_kind(width=width, color_system="standard", force_terminal=True, no_color=False)
    with console.capture() as capture:
        for style, line in lines:
            console.print(styled(line, style=_RICH_STYLES[style]))
    shown: str = capture.get()
    return shown.removesuffix("\n")
