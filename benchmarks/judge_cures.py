"""Judge the cures that nanwatch tells: whether they work, and whether a reviewer would accept the line.

    python benchmarks/judge_cures.py [NAMES...] [--only works|taste|formats] [--json] [--keep FOLDER]   # a minute

The models of `cures/models` come from public threads. Those of `cures/taste.py` have a form that a reviewer wants and a
value in float64; half of them are held back from tuning. Those of `cures/overflows.py` leave float16's range, and the
cures expected of each, a wider format or a clamp, stand beside it. Prints some lines for each model, how often each
rule cures one, and the scores. Exit status 1 where a cure is told that does not work, where fewer than nine of ten
models are cured, or where a search takes too long.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cures import overflows
from cures.judge import broken_promises, facts, judge, table
from cures.table import CURES
from cures.taste import TASTES
from cures.taste_judge import judge_taste, lines


def main() -> int:
    """Judge the models of the command line, all by default. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, help="a new folder in which the repositories and reports stay")
    parser.add_argument("--only", choices=("works", "taste", "formats"), help="one of the three judges")
    parser.add_argument("--half", choices=("tuned", "held"), help="one half of the cases of taste")
    parser.add_argument("--json", action="store_true", help="print the facts of each verdict")
    options = parser.parse_args()
    known = {cure.name: cure for cure in CURES}
    tastes = {taste.name: taste for taste in TASTES}
    if unknown := [name for name in options.names if name not in known and name not in tastes]:
        parser.error(f"no model is called {', '.join(unknown)}; see benchmarks/cures/models and taste.py")

    def asked(judge_name: str, cases: Iterable[Any]) -> list[Any]:
        return [
            case
            for case in cases
            if options.only in (None, judge_name) and (case.name in options.names or not options.names)
        ]

    cures, few = asked("works", CURES), asked("taste", TASTES)
    if options.half:
        few = [one for one in few if one.is_held == (options.half == "held")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        verdicts = judge(cures, folder / "works", options.jobs) if cures else []
        opinions = judge_taste(few, folder / "taste", options.jobs) if few and not options.json else []
    if options.json:
        sys.stdout.write(json.dumps([facts(one) for one in verdicts]))
        return 0
    for found in (table(verdicts) if verdicts else (), lines(opinions) if opinions else ()):
        sys.stdout.writelines(f"{line}\n" for line in found)
    if options.only in (None, "formats") and not options.names and not options.half:
        wrong = {name: overflows.wrong_cures(name) for name in overflows.CASES}
        sys.stdout.writelines(
            f"{'WRONG' if text else 'right'} {name} {text}\n" for name, text in wrong.items()
        )
        sys.stdout.write(f"formats: {sum(not text for text in wrong.values())} of {len(wrong)} right\n")
    broken = broken_promises([facts(one) for one in verdicts])
    if verdicts and not options.names and sum(one.is_patched for one in verdicts) < 60:
        broken.append("fewer than 60 patches work")
    sys.stdout.writelines(f"BROKEN {one}\n" for one in broken)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
