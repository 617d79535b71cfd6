"""`nanwatch show FILE`: the frames of a trace, or a report that was saved as JSON, to read."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..report.report import Report
from ..trace.trace_file import Trace, batch_words
from ..util import reading
from ..util.progress import Tell, shown
from ..util.visible import visible
from .commands import command_parser, failed

_EXAMPLES = """\
exit status: 0, or 2 when there is nothing to show

examples:
  nanwatch show run.parquet                      the latest batch
  nanwatch show run.parquet --batch 149 --html batch.html
  nanwatch show out/report.json
"""


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        with shown() as tell:
            report, heading = _report(options.file, options.batch, tell)
            if options.html is not None:
                options.html.write_text(report.to_html(tell), encoding="utf-8")
            tell("making the text")
            printed = (
                report.to_json()
                if options.json
                else "\n".join([*map(visible, heading), report.to_text(whole=True)])
            )
    except (ValueError, OSError, ImportError) as error:
        return failed("show", error)
    print(printed)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "show", "Print the frames of one batch of a trace, or a report that was saved as JSON.", _EXAMPLES
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a trace, or a report.json")
    parser.add_argument("--batch", type=int, metavar="N", help="of a trace: this batch (default: the latest)")
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write the report as a page too")
    return parser


def _report(file: Path, batch: int | None, tell: Tell) -> tuple[Report, list[str]]:
    """Return the report, and the lines above it."""
    if _is_json(file):
        if batch is not None:
            raise ValueError(f"--batch is for a trace, and {file} is a report; leave it out")
        tell(f"reading {file.name}")
        return Report.from_json(reading.file_text(file)), []
    trace = Trace.open(file, tell)
    if not trace.batches:
        raise ValueError(f"{trace.path} has no batch")
    heading = [f"{trace.path}: {batch_words(trace.batches)}, rank {trace.rank}"]
    if trace.lost_frames:
        heading[0] += f", {trace.lost_frames:,} frames lost"
    return trace.report(trace.batches[-1] if batch is None else batch), [*heading, ""]


def _is_json(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(64).lstrip()[:1] == b"{"
