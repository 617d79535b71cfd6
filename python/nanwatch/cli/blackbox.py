"""`nanwatch blackbox`: what a process was doing when it died, or does now, and which rank of a job stopped first."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..blackbox.box_file import state_folder
from ..blackbox.job import Job, job_html, job_text, read_job
from ..blackbox.story import SCHEMA, VERSION, BlackBoxReport, read_black_box
from ..blackbox.text import box_html, box_text, is_bad
from ..util.progress import Tell
from ..util.reading import plain
from .commands import answered, command_parser, write_page

_EXAMPLES = """\
PATH is a black box, the output_dir of a run, or a folder with black boxes; without it, the user's own folder for runs
without output_dir (~/.local/state/nanwatch). Of a folder, the newest job is shown, and with one process all about it.

exit status: 0 when all run or ended by themselves, 1 when a process did not, 2 when there is nothing to read

examples:
  nanwatch blackbox out              which rank stopped first, and where the others wait
  nanwatch blackbox out --live       where each rank is, every 2 s, without touching it
  nanwatch blackbox out/blackbox/rank-3-node7-4711-1857ac.blackbox
  nanwatch blackbox --html page.html
"""


class _Found(NamedTuple):
    text: str
    document: Any
    page: Callable[[], str]
    status: int


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    parser = command_parser(
        "blackbox", "Tell what a process was doing when it died, or what it does now.", _EXAMPLES
    )
    parser.add_argument("path", metavar="PATH", type=Path, nargs="?", help="a black box or a folder")
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write a page")
    parser.add_argument("--live", action="store_true", help="look again every 2 s until Ctrl-C")
    options = parser.parse_args(arguments)
    path = options.path or state_folder()

    def find(tell: Tell) -> tuple[str, int]:
        tell("reading")
        found = look(path)
        wrote = write_page(options.html, found.page, tell)
        if options.json:
            return json.dumps(found.document, indent=2, allow_nan=False), found.status
        return wrote or found.text, found.status

    status = answered("blackbox", find)
    while options.live and sys.stdout.isatty() and status != 2:
        time.sleep(2)
        sys.stdout.write("\x1b[H\x1b[2J")
        status = answered("blackbox", find)
    return status


def look(path: Path) -> _Found:
    """Read a black box or a folder of them. Raises ValueError or OSError."""
    if not path.is_dir():
        try:
            return _one(read_black_box(path))
        except ValueError as error:
            raise ValueError(f"{path} {error}") from error
    job = read_job(path)
    return _one(job.reports[0]) if len(job.reports) == 1 and not job.others else _all(job)


def _one(report: BlackBoxReport) -> _Found:
    document = {"schema": SCHEMA, "version": VERSION, **plain(report)}
    return _Found(box_text(report), document, lambda: box_html(report), int(is_bad(report)))


def _all(job: Job) -> _Found:
    first = job.first
    document = {
        "schema": f"{SCHEMA}.job",
        "version": VERSION,
        "first": None if first is None else first.rank,
        "ranks": [plain(one) for one in job.reports],
    }
    return _Found(job_text(job), document, lambda: job_html(job), int(any(map(is_bad, job.reports))))
