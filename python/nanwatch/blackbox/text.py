"""Text and page of a black box."""

from __future__ import annotations

import shlex
from datetime import datetime, timezone
from math import inf

from ..report import text
from ..report.page import NUMBER, TEXT, Level, Section, Table, page
from ..report.text import Fact
from ..util.visible import module_name, visible
from .story import BlackBoxReport, BoxBatch, BoxCall, signal_name

_CALLS = 10
_BATCHES = 5
_ENDS = {
    "runs": "It runs",
    "exit": "Ended by itself",
    "exception": "An exception",
    "unknown": "No mark of an end",
}


def box_text(report: BlackBoxReport) -> str:
    """Return the report as text, without a newline at its end."""
    lines = [f"{fact.head + ':':<8} {fact.body}" for fact in box_facts(report)]
    if report.calls:
        lines += [
            "",
            f"the latest {min(_CALLS, len(report.calls))} of {report.num_calls:,} calls that ended:",
        ]
    lines += [f"  {_call_words(one)}" for one in report.calls[-_CALLS:]]
    if report.batches:
        lines += ["", "the latest batches that ended:"]
        lines += [f"  {_batch_words(one)}" for one in report.batches[-_BATCHES:]]
    for note in report.notes:
        lines += ["", *_note_lines(note)]
    if report.frames:
        lines += ["", "the latest frames:", text.COLUMNS]
        lines += [line for frame in report.frames for line in text.frame_lines(frame)]
    return "\n".join(map(visible, lines))


def box_html(report: BlackBoxReport) -> str:
    """Return the report as a page."""
    columns = {"module": TEXT, "class": TEXT, "batch": NUMBER, "seconds": NUMBER, "ended": TEXT}
    sections: list[Section] = [
        Table(
            "calls",
            "The latest calls",
            columns,
            [
                (
                    module_name(one.module),
                    one.class_name,
                    one.batch,
                    seconds_words(one.seconds),
                    "raised" if one.raised else f"{seconds_words(one.ago)} before",
                )
                for one in reversed(report.calls)
            ],
        ),
        Table(
            "batches",
            "The latest batches",
            {"batch": NUMBER, "seconds": NUMBER, "least headroom": NUMBER, "where": TEXT},
            [
                (one.batch, seconds_words(one.seconds), Level(one.headroom), _where(one))
                for one in reversed(report.batches)
            ],
        ),
    ]
    how = signal_name(report.signal) if report.end == "signal" else _ENDS[report.end]
    headline = f"{how}; {where_words(report)}"
    facts = [(fact.head, fact.body) for fact in box_facts(report)]
    facts += [(str(note.get("kind", "note")), " ".join(_note_lines(note)[1:])) for note in report.notes]
    return page(
        "nanwatch blackbox --html",
        headline,
        moment_words(report.latest),
        facts,
        sections,
        is_bad=is_bad(report),
    )


def is_bad(report: BlackBoxReport) -> bool:
    """Return whether the process ended otherwise than by itself."""
    return report.end not in ("runs", "exit") or bool(report.exit_status)


def box_facts(report: BlackBoxReport) -> list[Fact]:
    """Return who the process was, how it ended, and what it was doing."""
    facts = report.facts
    argv = facts.get("argv")
    command = shlex.join(map(str, argv)) if isinstance(argv, list) else "?"
    rank = f", rank {report.rank} of {report.world_size}" if report.world_size > 1 else ""
    found = [
        Fact("Process", f"{report.pid} on {report.host}{rank}: {command}"),
        Fact("End", f"{ended_words(report)}{_after(report)}."),
        Fact("Where", f"{where_words(report)}."),
    ]
    if report.threads and len(calls := report.threads[0].calls) > 1:
        found.append(Fact("Within", " > ".join(module_name(one.module) for one in calls)))
    for thread in report.threads[1:]:
        found.append(Fact("Thread", f"{thread.id}: {_under_way(thread.calls[-1])}"))
    if report.pending:
        waiting = ", ".join(map(module_name, report.pending[:8]))
        found.append(
            Fact("Device", f"had not confirmed the work of these calls, the oldest first: {waiting}")
        )
    if report.python:
        ago = f"{seconds_words(report.python_ago)} before: " if report.python_ago else ""
        found.append(Fact("Python", ago + " < ".join(report.python)))
    found.append(Fact("Memory", f"{report.memory / 2**30:.2f} GiB" if report.memory else ""))
    words = [
        f"{name} {facts[name]}"
        for name in ("nanwatch", "torch", "cuda", "python", "device")
        if facts.get(name)
    ]
    found.append(Fact("With", ", ".join(words)))
    return [fact for fact in found if fact.body]


def ended_words(report: BlackBoxReport) -> str:
    """Return how the process ended, as a sentence without its full stop."""
    at = moment_words(report.latest)
    if report.end == "runs":
        return "it runs"
    if report.end == "signal":
        fault = report.signal_address
        address = f" at address {fault:#x}" if fault is not None else ""
        kernel = f" (the kernel says: {report.kernel})" if report.kernel else ""
        return f"signal {report.signal} ({signal_name(report.signal)}){address} at {at}{kernel}"
    if report.end == "exit":
        status = f" with exit status {report.exit_status}" if report.exit_status is not None else ""
        return f"Python ended by itself{status} at {at}"
    if report.end == "exception":
        error = next(
            (str(one.get("error", "")) for one in report.notes[::-1] if one.get("kind") == "exception"), ""
        )
        return f"an exception ended Python at {at}: {next(iter(error.splitlines()), '')}"
    why = (
        f"the kernel says: {report.kernel}"
        if report.kernel
        else "SIGKILL, os._exit or a lost machine leave none"
    )
    before = f"; it had got {signal_name(report.signal)}" if report.signal else ""
    return f"no mark of an end ({why}){before}; the latest sign of life is of {at}"


def where_words(report: BlackBoxReport) -> str:
    """Return what the process was doing."""
    if (call := report.under_way) is not None:
        return _under_way(call)
    if (call := report.raised) is not None:
        return f"batch {call.batch:,}, forward: {module_name(call.module)} ({call.class_name}) raised"
    if report.batch is None:
        return "before the first call of a watched module"
    if report.phase == "backward":
        module, part = report.gradient or ("?", "?")
        return f"batch {report.batch:,}, backward: the latest gradient was of the {part} of {module_name(module)}"
    if report.phase == "step":
        return f"after batch {report.batch:,}, in the optimizer's step or after it"
    return f"after the forward of batch {report.batch:,}, outside of watched modules"


def _under_way(call: BoxCall) -> str:
    # Without a later sign of life it is not known for how long.
    ran = f", which had run for {seconds_words(call.seconds)}" if call.seconds else ""
    return f"batch {call.batch:,}, forward: inside {module_name(call.module)} ({call.class_name}){ran}"


def _after(report: BlackBoxReport) -> str:
    if report.seconds_after is None or report.end == "runs":
        return ""
    return f", {seconds_words(report.seconds_after)} after its latest call ended"


def _call_words(call: BoxCall) -> str:
    took = "" if call.seconds is None else f" took {seconds_words(call.seconds)}"
    how = ", raised" if call.raised else ""
    return f"batch {call.batch:,}: {module_name(call.module)} ({call.class_name}){took}{how}"


def _batch_words(batch: BoxBatch) -> str:
    took = "" if batch.seconds is None else f" took {seconds_words(batch.seconds)}"
    how = ", raised" if batch.raised else ""
    room = ""
    if batch.headroom is not None:
        least = f"least headroom {batch.headroom:.1f} bits" if batch.headroom > -inf else "not finite"
        room = f", {least} in {_where(batch)}"
    return f"batch {batch.batch:,}{took}{how}{room}"


def _where(batch: BoxBatch) -> str:
    return "" if batch.headroom is None else f"{module_name(batch.module)} {batch.label}, {batch.dtype}"


def _note_lines(note: dict[str, object]) -> list[str]:
    lines = [f"{note.get('kind', 'note')}:"]
    for name, value in note.items():
        if name in ("kind", "time"):
            continue
        if isinstance(value, dict) and name == "stacks":
            for thread, places in value.items():
                lines.append(f"  thread {thread}:")
                lines += [f"    {place}" for place in (places if isinstance(places, list) else ())]
        elif isinstance(value, list):
            lines += [f"  {name}:", *(f"    {_item_words(item)}" for item in value)]
        else:
            first, *more = str(value).splitlines() or [""]
            lines += [f"  {name}: {first}", *(f"    {line}" for line in more)]
    return lines


def _item_words(item: object) -> str:
    """Return `count 2, dtype float32, 4.0 MiB` for a dictionary."""
    if not isinstance(item, dict):
        return str(item)
    return ", ".join(
        f"{value / 2**20:,.1f} MiB" if name == "bytes" and isinstance(value, int) else f"{name} {value}"
        for name, value in item.items()
    )


def seconds_words(seconds: float | None) -> str:
    """Return a time such as `3.1 s`, `12 ms` or `45 µs`, "" for None."""
    if seconds is None:
        return ""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1:
            return (
                f"{seconds * factor:,.3g} {unit}"
                if seconds * factor < 1000
                else f"{seconds * factor:,.0f} {unit}"
            )
    return f"{seconds * 1e6:.3g} µs"


def moment_words(seconds: float) -> str:
    """Return a moment in UTC."""
    try:
        return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "?"
