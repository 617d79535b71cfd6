"""`nanwatch compare MODEL_A MODEL_B INPUTS`: name the first module in which two implementations of a model differ."""

from __future__ import annotations

import argparse
import contextlib
import sys

from ..equivalence.compare import compare
from .commands import UseError, command_parser, failed, imported

_DIFFER = 1
_UNKNOWN = 2
_EXAMPLES = """\
MODEL_A, MODEL_B and INPUTS are PKG.MOD:NAME: an object, or what makes it when called without arguments. INPUTS is a
dict by name, a tuple by position, or the only argument. All are imported from the current directory too, which runs
their code. A wrapper that calls the model in its forward serves models that take different arguments.

exit status: 0 when nothing is above the noise floor, 1 when something is, 2 when the models cannot be compared

examples:
  nanwatch compare models:reference models:port models:batch
  nanwatch compare models:reference models:port models:batch --factor 20 --json
"""


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    options = _parser().parse_args(arguments)
    # The user's own code must not print on this command's stdout.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            names = {"MODEL_A": options.model_a, "MODEL_B": options.model_b, "INPUTS": options.inputs}
            model_a, model_b, inputs = (imported(value, name) for name, value in names.items())
            found = compare(model_a, model_b, inputs, factor=options.factor)
        except (UseError, ValueError, TypeError, RuntimeError) as error:
            return failed("compare", error)
    print(found.to_json() if options.json else found.to_text())
    return {True: 0, False: _DIFFER, None: _UNKNOWN}[found.equal]


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "compare",
        "Run two implementations of a model, with the same weights, on the same inputs, and name the first module that"
        " differs by more than rounding does.",
        _EXAMPLES,
    )
    parser.add_argument("model_a", metavar="MODEL_A", help="the reference, or what makes it")
    parser.add_argument("model_b", metavar="MODEL_B", help="the other implementation, or what makes it")
    parser.add_argument("inputs", metavar="INPUTS", help="the inputs of both, or what makes them")
    parser.add_argument(
        "--factor",
        type=float,
        default=8.0,
        metavar="N",
        help="how many times the noise floor a difference must have (default: %(default)g)",
    )
    return parser
