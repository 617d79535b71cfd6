"""`nanwatch blackbox`: what a process was doing when it died, or does now, and which rank of a job stopped first."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from ..blackbox.job import read_job
from ..blackbox.process import state_folder
from ..util.progress import Tell
from .commands import answered, command_parser, rendered

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


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    parser = command_parser(
        "blackbox", "Tell what a process was doing when it died, or what it does now.", _EXAMPLES
    )
    parser.add_argument("path", metavar="PATH", type=Path, nargs="?", help="a black box or a folder")
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write a page")
    parser.add_argument("--live", action="store_true", help="look again every 2 s until Ctrl-C")
    options = parser.parse_args(arguments)

    def find(tell: Tell) -> tuple[str, int]:
        tell("reading")
        job = read_job(options.path or state_folder())
        return rendered(job, options, tell), int(job.is_bad)

    status = answered("blackbox", find)
    while options.live and sys.stdout.isatty() and status != 2:
        time.sleep(2)
        sys.stdout.write("\x1b[H\x1b[2J")
        status = answered("blackbox", find)
    return status
