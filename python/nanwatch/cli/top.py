"""`nanwatch top RUN`: the modules of a trace by headroom or by trend, while the run still writes it."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

from ..report.page import bits_words
from ..trace.picture import Picture, Row, draw, trend_words
from ..trace.trace_file import Trace
from ..util.progress import Tell
from ..util.reading import plain
from ..util.visible import visible
from .commands import answered, command_parser
from .files import latest_batches, trace_line

_LATEST = 200  # batches; in a trace of 1,000,000 rows and 5,000 batches they take 0.1 s
_LINES = 20
_MARKS = 3  # the latest spikes and forecasts that are shown
_COLUMNS = ("headroom", "bits/100", "batch", "abs max", "failed", "module")
_EXAMPLES = """\
headroom is in bits, each a doubling that the largest element has left. bits/100 is its trend over 100 batches. batch
and abs max are those of the least headroom, and failed counts batches with a non-finite value. Above the table stand
the latest spikes and forecasts.

On a terminal the table is made again every 2 s until Ctrl-C, but not with --once or --json.

exit status: 0, or 2 when there is nothing to show

examples:
  nanwatch top run.parquet
  nanwatch top run.parquet --once --by trend
"""


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    parser = command_parser(
        "top", "Show the modules of a running trace by least headroom or by trend.", _EXAMPLES
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a trace: what watch(trace=...) was given")
    parser.add_argument(
        "--once", dest="live", action="store_const", const=0, default=2, help="print one table and end"
    )
    parser.add_argument("--by", choices=("headroom", "trend"), default="headroom", help="what comes first")
    for option, name, default, metavar, words in (
        ("--latest", "latest", _LATEST, "N", "of the latest N batches (default: %(default)s)"),
        ("--every", "live", 2, "S", "look again after S seconds (default: %(default)s)"),
    ):
        parser.add_argument(option, dest=name, type=_positive, default=default, metavar=metavar, help=words)
    # A folder may get its first part later. A trace that is not there would be waited for without end.
    return answered(parser, arguments, _find, waits=lambda options: options.run.is_dir())


def _find(options: argparse.Namespace, tell: Tell) -> tuple[str, int]:
    picture, heading = _look(options, tell)
    rows = list(picture.rows)  # by headroom
    if options.by == "trend":  # modules without one come last
        rows.sort(key=lambda row: (math.isnan(row.trend), row.trend))
    if options.json:
        document = {
            "trace": str(picture.path),
            "rank": picture.rank,
            "lost_frames": picture.lost_frames,
            "batches": [picture.batches[0][0], picture.batches[-1][0]],  # the first and the last of them
            "modules": [plain(row) for row in rows],
            "marks": [plain(mark) for mark in picture.marks],
        }
        return json.dumps(document, allow_nan=False, indent=2), 0
    room = shutil.get_terminal_size((80, _LINES + 10)).lines - len(heading) - 3
    shown = rows[: max(min(_LINES, room), 1)]
    more = [f"{len(rows) - len(shown):,} modules more"] if len(rows) > len(shown) else []
    return "\n".join(map(visible, [*heading, *_table(shown), *more])), 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"should be a number above 0, got {text!r}")
    return int(text)


def _look(options: argparse.Namespace, tell: Tell) -> tuple[Picture, list[str]]:
    """Return the picture of the latest batches, and lines about the trace and its latest spikes and forecasts.

    Raises ValueError or OSError for none.
    """
    trace = Trace.open(options.run, tell)
    picture = draw(trace, latest_batches(trace, options.latest))
    shown = f"; below are the latest {options.latest:,}" if len(trace.batches) > options.latest else ""
    lines = [trace_line(trace) + shown]
    for mark in picture.marks[-_MARKS:]:
        lines.append(mark.text if mark.kind == "spike" else f"batch {mark.batch}: {mark.text}")
    return picture, lines


def _table(rows: list[Row]) -> list[str]:
    """Return a line of headings and one for each row."""
    cells = [
        (bits_words(row.bits), trend_words(row.trend), str(row.batch), f"{row.abs_max:.2e}",
         str(row.num_failed or ""), row.place)
        for row in rows
    ]  # fmt: skip
    return ["  ".join([f"{cell:>9}" for cell in line[:-1]]) + f"  {line[-1]}" for line in (_COLUMNS, *cells)]
