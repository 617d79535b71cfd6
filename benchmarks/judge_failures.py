"""Judge what nanwatch says of models that fail as real ones do.

    python benchmarks/judge_failures.py                  # 64 models, a quarter of a minute
    python benchmarks/judge_failures.py -k softplus
    python benchmarks/judge_failures.py --write-table    # the table of docs/failures.md anew

A finding is right if its module, tensor, origin and value are the truth, which a person wrote beside each model of
`failures/`; if it names the operation and the line; if it is transient only where a re-run is finite; and if, where
float32 cures the model, a cure is said to work and those said to do.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from failures import CASES, table
from failures.judge import judge


def main() -> None:
    """Judge the cases that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", metavar="WORD", default="", help="only cases with this in their name")
    parser.add_argument("--write-table", action="store_true", help="write the table of docs/failures.md")
    options = parser.parse_args()
    if options.write_table:
        table.PAGE.write_text(table.page(table.PAGE.read_text()))
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    verdicts = []
    for case in CASES:
        if options.k in case.name:
            verdicts.append(judge(case))
            print(verdicts[-1], flush=True)
    for part in ("place", "operation", "transient", "cures"):
        print(
            f"{part:<10} {sum(not getattr(verdict, part) for verdict in verdicts)} of {len(verdicts)} right"
        )
    print(f"{'all':<10} {sum(verdict.is_right for verdict in verdicts)} of {len(verdicts)} right")


if __name__ == "__main__":
    main()
