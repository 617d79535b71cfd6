"""`nanwatch compare`, `diff`, `twice` and `replay`: what two executions, or one more, compute."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from ..capsule.capsule import FILE, Capsule
from ..compare.models import compare, compare_traces
from ..compare.recording import record
from ..compare.twice import VARIABLE, twice
from ..report import text
from ..session.api import rerun
from ..trace.comparison import KINDS, RTOL, diff
from ..trace.trace_file import Trace
from ..util.messages import Tell, module_name, spell, visible
from .commands import UseError, command_parser, imported, print_answer
from .run import add_script, check_script, run_script

_STATUSES = {True: 0, False: 1, None: 2}
_STATUS = "exit status: 0 when they are equal, 1 when they are not, 2 when they cannot be compared\n"
_COMPARE = f"""\
A, B and INPUTS are PKG.MOD:NAME: an object, or what makes it when called without arguments. INPUTS is a dict by name, a
tuple by position, or the only argument. All are imported from the current directory too, which runs their code.

Or A and B are traces that watch(trace=Trace(path, sketches=N)) has written. INPUTS is left out then, or is a trace of A
in higher precision, from which the noise floor is measured.

{_STATUS}
examples:
  nanwatch compare models:reference models:port models:batch --html compare.html
  nanwatch compare trainer.parquet engine.parquet trainer-fp32.parquet
"""
_DIFF = f"""\
{_STATUS}
examples:
  nanwatch diff before.parquet after.parquet
  nanwatch diff run.parquet --batches 149 150
  nanwatch diff fp32.parquet fp16.parquet --ignore dtype --rtol 0.05
"""
_TWICE = f"""\
Each run is a process of its own with the same arguments and environment. The script's own output is not shown.

{_STATUS}
examples:
  nanwatch twice --batches 20 train.py --lr 1e-3     the first 20 batches are enough
  nanwatch twice --json -m package.train > twice.json
"""


def compare_main(arguments: list[str]) -> int:
    """Run `nanwatch compare` and return the exit status."""
    what = (
        "Run two implementations of a model, with the same weights, on the same inputs, and name the first module that"
        " differs by more than rounding does. Or compare two traces with sketches, as of two engines."
    )
    parser = command_parser("compare", what, _COMPARE)
    parser.add_argument("a", metavar="A", help="the reference, or what makes it; or its trace")
    parser.add_argument("b", metavar="B", help="the other implementation, or what makes it; or its trace")
    parser.add_argument("inputs", metavar="INPUTS", nargs="?", help="the inputs of both, or what makes them")
    words = "how many times the noise floor a difference must have (default: %(default)g)"
    parser.add_argument("--factor", type=float, default=8.0, metavar="N", help=words)
    _add_batches_and_page(parser)

    def find(options: argparse.Namespace, tell: Tell) -> tuple[Any, int]:
        names = {"A": options.a, "B": options.b, "INPUTS": options.inputs}
        if os.path.exists(options.a) and os.path.exists(options.b):
            traces = [Trace.open(path, tell) for path in names.values() if path is not None]
            tell("comparing")
            result = compare_traces(*traces, batches=options.batches, factor=options.factor)
        elif options.inputs is None or options.batches is not None:
            accepted = "two traces that exist, or two models with INPUTS and without --batches"
            raise UseError(f"A and B should be {accepted}; got {options.a!r} and {options.b!r}")
        else:
            tell("running the models")
            result = compare(*(imported(value, name) for name, value in names.items()), factor=options.factor)
        return result, _STATUSES[result.equal]

    return print_answer(parser, arguments, find, errors=(TypeError, RuntimeError))


def diff_main(arguments: list[str]) -> int:
    """Run `nanwatch diff` and return the exit status."""
    what = "Name the first record in which two traces part, and what grew most from the one to the other."
    parser = command_parser("diff", what, _DIFF)
    parser.add_argument("a", metavar="A", help="a trace: what watch(trace=...) was given")
    parser.add_argument("b", metavar="B", nargs="?", help="another; without it --batches compares two of A")
    words = "relative difference of ranges that is equal (default: %(default)g)"
    parser.add_argument("--rtol", type=float, default=RTOL, help=words)
    words = "kinds of difference to pass over"
    parser.add_argument("--ignore", nargs="+", action="extend", default=[], choices=KINDS, help=words)
    _add_batches_and_page(parser)

    def find(options: argparse.Namespace, tell: Tell) -> tuple[Any, int]:
        a = Trace.open(options.a, tell)
        b = None if options.b is None else Trace.open(options.b, tell)
        result = diff(a, b, batches=options.batches, rtol=options.rtol, ignore=options.ignore)
        return result, _STATUSES[result.equal]

    return print_answer(parser, arguments, find)


def _add_batches_and_page(parser: Any) -> None:
    words = "of traces: batch N of A against batch M of B"
    parser.add_argument("--batches", nargs=2, type=int, metavar=("N", "M"), help=words)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page too")


def twice_main(arguments: list[str]) -> int:
    """Run `nanwatch twice` and return the exit status."""
    what = (
        "Run a script twice, compare all that its modules and optimizers compute, bit for bit, and name the first"
        " module that is not repeatable and what cures it. Options go before the script."
    )
    parser = command_parser("twice", what, _TWICE)
    add_script(parser)
    words = "end each run after N calls of the model (default: at its end)"
    parser.add_argument("--batches", type=int, metavar="N", help=words)
    words = "number of runs to compare (default: %(default)s)"
    parser.add_argument("--times", type=int, metavar="N", default=2, help=words)
    if request := os.environ.pop(VARIABLE, ""):
        run = parser.parse_args(arguments)
        return record(request, lambda: run_script(run.target, run.arguments, is_module=run.m))

    def find(options: argparse.Namespace, tell: Tell) -> tuple[Any, int]:
        check_script(options.target, is_module=options.m)
        how = {"batches": options.batches, "times": options.times}
        result = twice(options.target, options.arguments, is_module=options.m, tell=tell, **how)
        return result, _STATUSES[result.equal]

    return print_answer(parser, arguments, find, errors=(RuntimeError,))


# A capsule

_REPLAY = """\
exit status: 1 when a value was not finite again, 0 when all was finite, 2 when the call could not be made

examples:
  nanwatch replay run/capsule --model train:make_model
  nanwatch replay run/capsule --model train:make_model --dtype float32
  nanwatch replay run/capsule --model train:make_model --device cpu --json
"""


def replay_main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    what = "Make the module call in a capsule again and say whether a value is not finite again."
    parser = command_parser("replay", what, _REPLAY)
    words = "a capsule, the failure's folder, or output_dir: the newest in it"
    parser.add_argument("capsule", metavar="CAPSULE", help=words)
    words = (
        "the model, or what makes it when called without arguments; imported from the current directory too."
        " This runs its code: name only what you trust"
    )
    parser.add_argument("--model", required=True, metavar="PKG.MOD:NAME", help=words)
    parser.add_argument("--device", help="where to run; by default where the recorded call ran, or the CPU")
    words = "cast weights and inputs to it, with autocast off; by default as recorded"
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), help=words)
    return print_answer(parser, arguments, _replay)


def _replay(options: argparse.Namespace, tell: Tell) -> tuple[str, int]:
    tell(f"reading {options.capsule}")
    folder = Path(options.capsule)
    # A failure's folder has a capsule, and `output_dir` has the folders of several failures.
    newest = sorted(folder.glob(f"*/capsule/{FILE}"), key=lambda file: -file.stat().st_mtime_ns)
    files = (file for file in (folder / FILE, folder / "capsule" / FILE, *newest) if file.exists())
    capsule = Capsule.open(next(files, folder / FILE).parent)
    tell(f"importing {options.model}")
    model = imported(options.model, "--model")
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise UseError(f"--model {options.model} should be a torch.nn.Module or make one, got {kind}")
    tell("making the call")
    try:
        done = rerun(capsule, model, options.dtype and getattr(torch, options.dtype), options.device)
    except Exception as error:
        raise UseError(f"the call could not be made: {spell(error)}") from None
    verdict, words, status = "not seen", "nothing could be looked at", 2
    if done.report.finding is not None:
        verdict, words, status = "non-finite", text.summary(done.report.finding), 1
    elif any(record.isfinite for frame in done.report.frames for record in frame.records):
        verdict, words, status = "finite", "all finite", 0
    if options.json:
        document = {
            "capsule": str(capsule.folder),
            "module": capsule.module,
            "class": capsule.class_name,
            "versions": dict(capsule.versions),
            "left_out": list(capsule.left_out),
            "dtype": options.dtype,
            "device": str(done.device),
            "verdict": verdict,
            "remarks": list(done.remarks),
            "report": json.loads(done.report.to_json()),
        }
        return json.dumps(document, indent=2), status
    versions = f"torch {capsule.versions.get('torch')}, nanwatch {capsule.versions.get('nanwatch')}"
    name = f"{module_name(capsule.module)} ({capsule.class_name})"
    head = f"{capsule.folder}: {name} on {capsule.device}, {versions}"
    lines = [head, f"{options.dtype or 'as recorded'}: {words}"]
    shown = ["", done.report.to_text()] if done.report.finding is not None else []
    remarks = ["", *[f"Note:  {remark}" for remark in done.remarks]] if done.remarks else []
    return "\n".join([*map(visible, lines), *shown, *map(visible, remarks)]), status
