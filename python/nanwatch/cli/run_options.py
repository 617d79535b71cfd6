"""The options of `nanwatch run`: those of `watch`, and how its help describes them."""

from __future__ import annotations

import argparse
import inspect

from ..session.api import watch
from ..session.options import ACTIONS, CHECKS, LOG_EVERY, MAX_SKIPPED_STEPS, REREAD_WEIGHTS
from .model_finder import MAX_MODELS

# Exit statuses.
NONFINITE, BAD_USE, FAILED = 3, 2, 1
_NOTES = f"""\
Which model: the first module that is called from outside any other module and has parameters to train, in training
mode or known to an optimizer; or the module that holds it, as a LightningModule does. Models that are called later are
watched too, each by itself, up to {MAX_MODELS}.

stdout, arguments and exit status are the script's own. The report of a failure goes to stderr.

exit status:
  {NONFINITE}  a value was not finite, and the script did not catch the error that says so
  {BAD_USE}  the options make no sense, there is no such script, or a pattern matches nothing
  {FAILED}  the script ended by an exception of its own
  otherwise the script's; 0 after --abort-after-batch

examples:
  nanwatch run train.py --lr 1e-3
  nanwatch run --output-dir nanwatch-out --on-nonfinite warn train.py --lr 1e-3
  nanwatch run --include 'encoder.*' --json report.json -m package.train --lr 1e-3
  nanwatch run --model GPT2LMHeadModel generate.py          a model that is not trained, by its class
  torchrun --nproc-per-node 2 -m nanwatch run train.py      each process watches its own
"""

_HELP = {
    "weights": "read weights (the default)",
    "buffers": "read buffers of floating point (the default)",
    "inputs": "read inputs (the default)",
    "outputs": "read outputs (the default)",
    "gradients": "read the gradients of every backward, and stop before a step takes a bad one",
    "counts": "count zeros, subnormals, nans and infinities of every tensor, for reports and --trace (slow)",
    "forecast": "warn of tensors that lose headroom and will overflow soon (the default)",
}
# Boolean options of `watch` become flags by themselves, but for those that mean something else here.
_NO_FLAG = ("enabled",)


def run_parser() -> argparse.ArgumentParser:
    """Return the parser of `nanwatch run`."""
    parser = argparse.ArgumentParser(
        prog="nanwatch run",
        usage="%(prog)s [OPTION...] SCRIPT [ARG...]\n       %(prog)s [OPTION...] -m MODULE [ARG...]",
        description="Run an unchanged training script and watch its model. Options go before the script.",
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="SCRIPT", help="the script, or with -m the module")
    parser.add_argument("arguments", metavar="ARG", nargs=argparse.REMAINDER, help="its own arguments")
    parser.add_argument("-m", action="store_true", help="run a module, as `python -m` does")
    parser.add_argument(
        "--model", metavar="CLASS", help="watch modules of this class (a pattern), trained or not"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the report as JSON when the script has ended; /dev/fd/3 for a descriptor",
    )
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        help="write each failure's report (text, JSON, HTML) and capsule into this folder",
    )
    parser.add_argument(
        "--on-nonfinite",
        choices=ACTIONS,
        default="raise",
        help="at a nan or an inf raise NonFiniteError, warn and run on, or only record it (raise)",
    )
    parser.add_argument(
        "--check",
        choices=CHECKS,
        default="auto",
        help="act at the module that holds the value, at the end of the batch, or, async, when a GPU has delivered"
        " (auto: module on a CPU, batch on a GPU)",
    )
    parser.add_argument(
        "--max-frames",
        type=int,
        default=21,
        metavar="N",
        help="keep the latest N frames, calls of modules, for the report (21)",
    )
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="read only the batches 0, N, 2N, ... (1)"
    )
    parser.add_argument(
        "--reread-weights",
        type=int,
        default=REREAD_WEIGHTS,
        metavar="N",
        help="read a weight again after N batches, though nothing says that it changed (%(default)s)",
    )
    for option, what in (
        ("include", "watch only modules whose name matches, such as 'encoder.*'"),
        ("exclude", "do not watch modules whose name matches"),
        ("allow-inf", "infinities are meant in modules whose name matches; a nan still counts"),
    ):
        parser.add_argument(
            f"--{option}", action="append", default=[], metavar="PATTERN", help=f"{what}; may be repeated"
        )
    parser.add_argument(
        "--trace-batches",
        type=_numbers,
        default=(),
        metavar="N,N",
        help="print the frames of these batches on stdout, or write only them to --trace",
    )
    parser.add_argument(
        "--trace",
        metavar="PATH",
        help="write every frame into this Parquet file, for 'nanwatch show', 'diff' and 'formats'",
    )
    parser.add_argument(
        "--log-to", metavar="DIR", help="log headroom, ranges and forecasts for TensorBoard into this folder"
    )
    parser.add_argument(
        "--log-every",
        type=int,
        default=LOG_EVERY,
        metavar="N",
        help="with --log-to: log one in N batches (%(default)s)",
    )
    parser.add_argument(
        "--max-skipped-steps",
        type=int,
        default=MAX_SKIPPED_STEPS,
        metavar="N",
        help="with --gradients: act when GradScaler has skipped more than N steps in a row (%(default)s)",
    )
    parser.add_argument(
        "--peer-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="with several ranks: wait at most S seconds for all to agree on where it began, 0 for none (30)",
    )
    parser.add_argument(
        "--abort-after-batch", type=int, metavar="N", help="end the run after batch N, with status 0"
    )
    parser.add_argument(
        "--microscope",
        action=argparse.BooleanOptionalAction,
        help="run a failed batch once more to find the operation and try cures (the default with --on-nonfinite raise)",
    )
    for option, parameter in inspect.signature(watch).parameters.items():
        if isinstance(parameter.default, bool) and not option.startswith("_") and option not in _NO_FLAG:
            parser.add_argument(
                f"--{option.replace('_', '-')}",
                action=argparse.BooleanOptionalAction,
                default=parameter.default,
                help=_HELP[option],
            )
    return parser


def _numbers(value: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in value.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} should be batch numbers such as 0,3") from None
