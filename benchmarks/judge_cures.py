"""Judge the cures: failing models from public threads, each cured by what nanwatch tells, in a process of its own.

    python benchmarks/judge_cures.py [NAMES...] [--json] [--keep FOLDER]    # half a minute on two cores

Prints some lines for each model, the rules by how many models they cure, and the totals.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from cures.judge import facts, judge, table
from cures.table import CURES


def main() -> None:
    """Judge the models of the command line, all by default."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, help="a new folder in which the repositories and reports stay")
    parser.add_argument("--json", action="store_true", help="print the facts of each verdict")
    options = parser.parse_args()
    known = {cure.name: cure for cure in CURES}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no model is called {', '.join(unknown)}; see benchmarks/cures/models")
    cures = [known[name] for name in options.names] or CURES
    with tempfile.TemporaryDirectory() as temporary:
        verdicts = judge(cures, options.keep or Path(temporary), options.jobs)
    if options.json:
        sys.stdout.write(json.dumps([facts(one) for one in verdicts]))
    else:
        sys.stdout.writelines(f"{line}\n" for line in table(verdicts))


if __name__ == "__main__":
    main()
