"""`nanwatch top RUN`: the modules of a trace by headroom or by trend, while the run still writes it."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from ..report.page import bits_words, level_of
from ..trace.picture import Picture, Row, draw, trend_words
from ..trace.trace_file import Trace, batch_words
from ..util.imports import needed
from ..util.reading import plain
from ..util.visible import spell, visible
from .commands import command_parser, failed

_LATEST = 200  # batches; in a trace of 1,000,000 rows and 5,000 batches they take 0.1 s
_LINES = 20
_MARKS = 3  # the latest spikes and forecasts that are shown
_COLUMNS = ("headroom", "bits/100", "batch", "abs max", "failed", "module")
_COLORS = {"gone": "bold red", "near": "red", "low": "yellow", "fine": "green", "none": "dim"}
_EXAMPLES = """\
headroom is in bits, each a doubling that the largest element has left. bits/100 is its trend over 100 batches. batch
and abs max are those of the least headroom, and failed counts batches with a non-finite value. Above the table stand
the latest spikes and forecasts.

Ctrl-C ends. Needs the package rich, but not with --once, --json or into a pipe.

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
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--by", choices=("headroom", "trend"), default="headroom", help="what comes first")
    for option, default, metavar, words in (
        ("--latest", _LATEST, "N", "of the latest N batches (default: %(default)s)"),
        ("--every", 2, "S", "look again after S seconds (default: %(default)s)"),
    ):
        parser.add_argument(option, type=_positive, default=default, metavar=metavar, help=words)
    options = parser.parse_args(arguments)
    try:
        if not (options.once or options.json or not sys.stdout.isatty()):
            return _watch(options)
        picture, heading = _look(options)
    except (ValueError, OSError, ImportError) as error:
        return failed("top", error)
    if options.json:
        document = {
            "trace": str(picture.path),
            "rank": picture.rank,
            "lost_frames": picture.lost_frames,
            "batches": [picture.batches[0][0], picture.batches[-1][0]],  # the first and the last of them
            "modules": [plain(row) for row in _sorted(picture, options.by)],
            "marks": [plain(mark) for mark in picture.marks],
        }
        print(json.dumps(document, allow_nan=False, indent=2))
        return 0
    print("\n".join(map(visible, [*heading, *_table(_sorted(picture, options.by)[:_LINES])])))
    if len(picture.rows) > _LINES:
        print(f"{len(picture.rows) - _LINES:,} modules more")
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"should be a number above 0, got {text!r}")
    return int(text)


def _look(options: argparse.Namespace) -> tuple[Picture, list[str]]:
    """Return the picture of the latest batches, and lines about the trace and its latest spikes and forecasts.

    Raises ValueError or OSError for none.
    """
    trace = Trace.open(options.run)
    if not trace.batches:
        raise ValueError(f"{trace.path} has no batch yet")
    picture = draw(trace, trace.batches[-options.latest :])
    lost = f", {trace.lost_frames:,} frames lost" if trace.lost_frames else ""
    shown = f"; below are the latest {options.latest:,}" if len(trace.batches) > options.latest else ""
    lines = [f"{trace.path}: {batch_words(trace.batches)}, rank {trace.rank}{lost}{shown}"]
    for mark in picture.marks[-_MARKS:]:
        lines.append(mark.text if mark.kind == "spike" else f"batch {mark.batch}: {mark.text}")
    return picture, lines


def _sorted(picture: Picture, by: str) -> list[Row]:
    if by == "headroom":
        return list(picture.rows)
    # Modules without a trend come last.
    return sorted(picture.rows, key=lambda row: (math.isnan(row.trend), row.trend))


def _table(rows: list[Row]) -> list[str]:
    """Return a line of headings and one for each row."""
    cells = [
        (bits_words(row.bits), trend_words(row.trend), str(row.batch), f"{row.abs_max:.2e}",
         str(row.num_failed or ""), row.place)
        for row in rows
    ]  # fmt: skip
    return ["  ".join([f"{cell:>9}" for cell in line[:-1]]) + f"  {line[-1]}" for line in (_COLUMNS, *cells)]


def _watch(options: argparse.Namespace) -> int:
    """Look at the trace again and again until Ctrl-C."""
    rich: Any = needed("rich.live", "the live view", "terminal", "use --once")
    from rich.text import Text

    # A trace that is not there would be waited for without end. A folder may get its first part later.
    if not options.run.is_dir():
        Trace.open(options.run)
    with rich.Live(screen=True, auto_refresh=False) as live:
        try:
            while True:
                try:
                    picture, heading = _look(options)
                    rows = _sorted(picture, options.by)[: max(live.console.height - len(heading) - 2, 1)]
                    styles = [""] * (len(heading) + 1) + [_COLORS[level_of(row.bits)] for row in rows]
                    lines = zip([*heading, *_table(rows)], styles, strict=True)
                    view = Text("\n").join(Text(visible(line), style) for line, style in lines)
                except (ValueError, OSError) as error:  # nothing yet, or just now the parts became one file
                    view = Text(f"waiting: {spell(error)}")
                live.update(view, refresh=True)
                time.sleep(options.every)
        except KeyboardInterrupt:
            return 0
