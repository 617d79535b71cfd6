"""`nanwatch bisect MODEL INPUTS`: find the switch that changes what a model computes."""

from __future__ import annotations

import argparse
import contextlib
import sys

from ..equivalence.bisect import NAMES, bisect
from ..util.progress import shown
from .commands import UseError, command_parser, failed, imported

_CHANGED = 1
_EXAMPLES = """\
MODEL and INPUTS are PKG.MOD:NAME: an object, or what makes it when called without arguments. INPUTS is a dict by name,
a tuple by position, or the only argument. Both are imported from the current directory too, which runs their code.

exit status: 0 when nothing changes the numbers, 1 when a switch does, 2 when the model cannot be run

examples:
  nanwatch bisect train:make_model train:make_batch
  nanwatch bisect train:make_model train:make_batch --switch compile --exact
  nanwatch bisect train:make_model train:make_batch --backward --json
"""


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    options = _parser().parse_args(arguments)
    # The user's own code must not print on this command's stdout.
    with shown() as tell, contextlib.redirect_stdout(sys.stderr):
        try:
            model, inputs = imported(options.model, "MODEL"), imported(options.inputs, "INPUTS")
            found = bisect(
                model,
                inputs,
                loss=options.backward,
                switches=options.switch or None,
                backend=options.backend,
                exact=options.exact,
                tell=tell,
            )
        except (UseError, ValueError, TypeError, RuntimeError) as error:
            return failed("bisect", error)
    print(found.to_json() if options.json else found.to_text())
    return 0 if found.equal else _CHANGED


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "bisect",
        "Find the switch that changes what a model computes: a module that torch.compile compiles wrongly, autocast, a"
        " fused kernel. Takes at most log2(n) + 3 runs for n switches.",
        _EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="the model, or what makes it")
    parser.add_argument("inputs", metavar="INPUTS", help="its inputs, or what makes them")
    parser.add_argument(
        "--switch",
        nargs="+",
        action="extend",
        default=[],
        choices=NAMES,
        help="the switches (default: those that are on at present, and compile)",
    )
    parser.add_argument("--backend", default="inductor", help="that of torch.compile (default: %(default)s)")
    parser.add_argument("--exact", action="store_true", help="count a difference in any bit")
    parser.add_argument(
        "--backward", action="store_true", help="compare the gradients of the sum of the outputs' squares too"
    )
    return parser
