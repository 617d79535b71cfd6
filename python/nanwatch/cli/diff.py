"""`nanwatch diff A B`: find where two traces, or two batches of one, part."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..trace.comparison import RTOL, diff
from ..trace.difference import KINDS
from ..trace.trace_file import Trace
from ..util.progress import shown
from .commands import command_parser, failed

_DIFFER = 1
_EXAMPLES = """\
exit status: 1 when they differ, 0 when they do not, 2 when they cannot be compared

examples:
  nanwatch diff before.parquet after.parquet
  nanwatch diff run.parquet --batches 149 150
  nanwatch diff fp32.parquet fp16.parquet --ignore dtype --rtol 0.05
  nanwatch diff before.parquet after.parquet --html diff.html --json
"""


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        with shown() as tell:
            batches = None if options.batches is None else (options.batches[0], options.batches[1])
            one = Trace.open(options.a, tell)
            other = None if options.b is None else Trace.open(options.b, tell)
            found = diff(one, other, batches=batches, rtol=options.rtol, ignore=options.ignore)
            if options.html is not None:
                tell("drawing the page")
                options.html.write_text(found.to_html(), encoding="utf-8")
    except (ValueError, OSError, ImportError) as error:
        return failed("diff", error)
    print(found.to_json() if options.json else found.to_text())
    return _DIFFER if found.differs else 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "diff",
        "Name the first record in which two traces part, and what grew most from the one to the other.",
        _EXAMPLES,
    )
    parser.add_argument("a", metavar="A", help="a trace: what watch(trace=...) was given")
    parser.add_argument(
        "b", metavar="B", nargs="?", help="another; without it --batches compares two batches of A"
    )
    parser.add_argument(
        "--batches", nargs=2, type=int, metavar=("N", "M"), help="batch N of A against batch M of B"
    )
    parser.add_argument(
        "--rtol",
        type=float,
        default=RTOL,
        help="relative difference of ranges that is equal (default: %(default)g)",
    )
    parser.add_argument(
        "--ignore",
        nargs="+",
        action="extend",
        default=[],
        choices=KINDS,
        help="kinds of difference to pass over",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts too")
    return parser
