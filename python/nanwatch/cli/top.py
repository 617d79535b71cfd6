"""`nanwatch top RUN`: the modules of a trace by headroom or by trend, while the run still writes it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ..report.page import bits_words, level_of
from ..trace.picture import Mark, Picture, Row, draw, trend_words
from ..trace.trace_file import Trace, batch_words
from ..util.imports import needed
from ..util.reading import plain
from ..util.visible import spell, visible
from .commands import command_parser, failed

_LATEST = 200  # batches; in a trace of 1,000,000 rows and 5,000 batches they take 0.1 s
_LINES = 20
_MARKS = 3  # the latest spikes and forecasts
_COLUMNS = ("headroom", "bits/100", "batch", "abs max", "failed", "module")
_COLORS = {"gone": "bold red", "near": "red", "low": "yellow", "fine": "green", "none": "dim"}
_EXAMPLES = """\
headroom is in bits, each a doubling that the largest element has left. bits/100 is its trend over 100 batches. batch
and abs max are those of the least headroom, and failed counts batches with a non-finite value. Above the table stand
the latest spikes and forecasts.

keys: t sorts by trend, h by headroom, q ends. Needs the package textual, but not with --once, --json or into a pipe.

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
    parser.add_argument(
        "--by",
        choices=("headroom", "trend"),
        default="headroom",
        help="what comes first (default: %(default)s)",
    )
    parser.add_argument(
        "--latest",
        type=_positive,
        default=_LATEST,
        metavar="N",
        help="of the latest N batches (default: %(default)s)",
    )
    parser.add_argument(
        "--every",
        type=_positive,
        default=2,
        metavar="S",
        help="look again after S seconds (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        if not (options.once or options.json or not sys.stdout.isatty()):
            _app(options).run()
            return 0
        picture, heading = _look(options.run, options.latest)
    except (ValueError, OSError, ImportError) as error:
        return failed("top", error)
    rows = _sorted(picture, options.by)
    if options.json:
        print(json.dumps(_document(picture, rows), allow_nan=False, indent=2))
        return 0
    print("\n".join(map(visible, [*heading, *_table(rows[:_LINES])])))
    if len(rows) > _LINES:
        print(f"{len(rows) - _LINES:,} modules more")
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"should be a number above 0, got {text!r}")
    return int(text)


def _look(run: Path, latest: int) -> tuple[Picture, list[str]]:
    """Return the picture of the latest batches, and lines about the trace and its latest spikes and forecasts.

    Raises ValueError or OSError for none.
    """
    trace = Trace.open(run)
    if not trace.batches:
        raise ValueError(f"{trace.path} has no batch yet")
    picture = draw(trace, trace.batches[-latest:])
    lost = f", {trace.lost_frames:,} frames lost" if trace.lost_frames else ""
    shown = f"; below are the latest {latest:,}" if len(trace.batches) > latest else ""
    heading = f"{trace.path}: {batch_words(trace.batches)}, rank {trace.rank}{lost}{shown}"
    return picture, [heading, *(_told(one) for one in picture.marks[-_MARKS:])]


def _told(mark: Mark) -> str:
    return mark.text if mark.kind == "spike" else f"batch {mark.batch}: {mark.text}"


def _sorted(picture: Picture, by: str) -> list[Row]:
    if by == "headroom":
        return list(picture.rows)
    # Modules without a trend come last.
    return sorted(picture.rows, key=lambda row: (math.isnan(row.trend), row.trend))


def _document(picture: Picture, rows: list[Row]) -> dict[str, Any]:
    """Return the JSON document. `batches` are the first and the last that were looked at."""
    return {
        "trace": str(picture.path),
        "rank": picture.rank,
        "lost_frames": picture.lost_frames,
        "batches": [int(picture.first[0]), int(picture.last[-1])],
        "modules": [plain(row) for row in rows],
        "marks": [plain(one) for one in picture.marks],
    }


def _cells(row: Row) -> list[str]:
    return [
        bits_words(row.bits), trend_words(row.trend), str(row.batch), f"{row.abs_max:.2e}",
        str(row.num_failed or ""), row.place,
    ]  # fmt: skip


def _table(rows: list[Row]) -> list[str]:
    lines = [[*_COLUMNS], *map(_cells, rows)]
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    return [
        "  ".join([*(cell.rjust(size) for cell, size in zip(line, wide, strict=False)), line[-1]])
        for line in lines
    ]


def _app(options: argparse.Namespace) -> Any:
    """Return the application of textual that looks at the trace again and again."""
    base: Any = needed("textual.app", "the live view", "top", "use --once").App
    widgets, text = import_module("textual.widgets"), import_module("rich.text")
    # A trace that is not there would be waited for without end. A folder may get its first part later.
    if not options.run.is_dir():
        Trace.open(options.run)

    class Top(base):  # type: ignore[misc]
        """A line about the trace, a table of modules, and the keys."""

        ENABLE_COMMAND_PALETTE = False
        BINDINGS = (
            ("h", "by('headroom')", "by headroom"),
            ("t", "by('trend')", "by trend"),
            ("q", "quit", "quit"),
        )

        def __init__(self) -> None:
            super().__init__()
            self._by: str = options.by
            self._picture: Picture | None = None
            self._is_looking = False
            self._shown: list[list[str]] | None = None

        def compose(self) -> Any:
            yield widgets.Static(id="heading", markup=False)
            yield widgets.DataTable(cursor_type="row", zebra_stripes=True)
            yield widgets.Footer()

        def on_mount(self) -> None:
            self._start_look()
            self.set_interval(options.every, self._start_look)

        def action_by(self, what: str) -> None:
            self._by = what
            self._fill()

        def _start_look(self) -> None:
            if not self._is_looking:  # a slow disk must not pile up threads
                self._is_looking = True
                self.run_worker(self._read, thread=True)

        def _read(self) -> None:
            try:
                picture, heading = _look(options.run, options.latest)
            except (ValueError, OSError) as error:  # nothing yet, or in this moment the parts became one file
                picture, heading = None, [f"waiting: {spell(error)}"]
            self.call_from_thread(self._take, picture, heading)

        def _take(self, picture: Picture | None, heading: list[str]) -> None:
            self._is_looking = False
            self.query_one("#heading").update("\n".join(map(visible, heading)))
            if picture is not None:
                self._picture = picture
                self._fill()

        def _fill(self) -> None:
            if self._picture is None:
                return
            rows = _sorted(self._picture, self._by)
            cells = [*map(_cells, rows)]
            if cells == self._shown:
                return
            table = self.query_one(widgets.DataTable)
            row, top = table.cursor_row, table.scroll_y
            if self._shown is None:
                table.add_columns(*_COLUMNS)
            table.clear()
            self._shown = cells
            for one, line in zip(rows, cells, strict=True):
                words = [text.Text(visible(cell), justify="right") for cell in line]
                words[0].stylize(_COLORS[level_of(one.bits)])
                words[-1].justify = "left"
                table.add_row(*words)
            table.move_cursor(row=row, scroll=False)
            table.scroll_to(y=top, animate=False)

    return Top()
