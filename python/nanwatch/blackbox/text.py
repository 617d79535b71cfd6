"""Text of a black box: who the process was, how it ended, and what it was doing."""

from __future__ import annotations

import shlex
from datetime import datetime, timezone

from ..report import text
from ..report.text import Fact
from ..util.visible import module_name, visible
from .story import BlackBoxReport, BoxCall, signal_name

_CALLS = 10


def box_text(report: BlackBoxReport) -> str:
    """Return the report as text, without a newline at its end."""
    lines = [f"{fact.head + ':':<8} {fact.body}" for fact in box_facts(report)]
    if latest := report.calls[-_CALLS:]:
        lines += ["", f"the latest {len(latest)} of {report.num_calls:,} calls that ended:"]
    for call in latest:
        took = f" took {seconds_words(call.seconds)}" if call.seconds is not None else ""
        raised = ", raised" if call.raised else ""
        lines.append(f"  batch {call.batch:,}: {module_name(call.module)} ({call.class_name}){took}{raised}")
    for note in report.notes:
        lines += ["", *_note_lines(note)]
    if report.frames:
        lines += ["", "the latest frames:", text.COLUMNS]
        lines += [line for frame in report.frames for line in text.frame_lines(frame)]
    return "\n".join(map(visible, lines))


def box_facts(report: BlackBoxReport) -> list[Fact]:
    """Return who the process was, how it ended, and what it was doing."""
    argv = report.facts.get("argv")
    command = shlex.join(map(str, argv)) if isinstance(argv, list) else "?"
    rank = f", rank {report.rank} of {report.world_size}" if report.world_size > 1 else ""
    after = ""
    if report.seconds_after is not None and report.end != "runs":
        after = f", {seconds_words(report.seconds_after)} after its latest call ended"
    facts = [
        Fact("Process", f"{report.pid} on {report.host}{rank}: {command}"),
        Fact("End", f"{ended_words(report)}{after}."),
        Fact("Where", f"{where_words(report)}."),
    ]
    if report.threads and len(calls := report.threads[0].calls) > 1:
        facts.append(Fact("Within", " > ".join(module_name(call.module) for call in calls)))
    facts += [Fact("Thread", f"{thread.id}: {_under_way(thread.calls[-1])}") for thread in report.threads[1:]]
    if report.pending:
        waiting = ", ".join(map(module_name, report.pending[:8]))
        facts.append(
            Fact("Device", f"had not confirmed the work of these calls, the oldest first: {waiting}")
        )
    if report.python:
        ago = f"{seconds_words(report.python_ago)} before: " if report.python_ago else ""
        facts.append(Fact("Python", ago + " < ".join(report.python)))
    if report.memory:
        facts.append(Fact("Memory", f"{report.memory / 2**30:.2f} GiB"))
    known = [
        f"{name} {report.facts[name]}"
        for name in ("nanwatch", "torch", "cuda", "python", "device")
        if report.facts.get(name)
    ]
    return [*facts, Fact("With", ", ".join(known))] if known else facts


def ended_words(report: BlackBoxReport) -> str:
    """Return how the process ended, as a sentence without its full stop."""
    at = moment_words(report.latest)
    if report.end == "runs":
        return "it runs"
    if report.end == "signal":
        address = f" at address {report.signal_address:#x}" if report.signal_address is not None else ""
        return f"signal {report.signal} ({signal_name(report.signal)}){address} at {at}"
    if report.end == "exit":
        status = f" with exit status {report.exit_status}" if report.exit_status is not None else ""
        return f"Python ended by itself{status} at {at}"
    if report.end == "exception":
        errors = [str(note.get("error", "")) for note in report.notes if note.get("kind") == "exception"]
        return (
            f"an exception ended Python at {at}: {next(iter(errors[-1].splitlines()), '') if errors else ''}"
        )
    before = f"; it had got {signal_name(report.signal)}" if report.signal else ""
    return (
        f"no mark of an end (SIGKILL, os._exit or a lost machine leave none){before};"
        f" the latest sign of life is of {at}"
    )


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
            lines += [f"  {name}:", *(f"    {item}" for item in value)]
        else:
            first, *more = str(value).splitlines() or [""]
            lines += [f"  {name}: {first}", *(f"    {line}" for line in more)]
    return lines


def seconds_words(seconds: float | None) -> str:
    """Return a time such as `3.1 s`, `12 ms` or `45 µs`, "" for None."""
    if seconds is None:
        return ""
    if abs(seconds) >= 1000:
        return f"{seconds:,.0f} s"
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def moment_words(seconds: float) -> str:
    """Return a moment in UTC."""
    try:
        return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "?"
