"""`nanwatch compare`, `diff` and `twice`: do two executions compute the same?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ..compare.models import compare
from ..compare.recording import EnoughError, Recorder, Recording, TensorPrint
from ..compare.traces import compare_traces
from ..compare.trials import TRIALS
from ..compare.twice import examine
from ..trace.comparison import RTOL, diff
from ..trace.difference import KINDS
from ..trace.trace_file import Trace
from ..util.progress import Tell
from ..util.visible import spell
from .commands import EQUAL_STATUS, UseError, answered, command_parser, imported, rendered
from .script import add_script, check_script, run_script

# Has the request in a process that makes one of the runs of `twice`.
_VARIABLE = "NANWATCH_TWICE"
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
    parser.add_argument(
        "--factor",
        type=float,
        default=8.0,
        metavar="N",
        help="how many times the noise floor a difference must have (default: %(default)g)",
    )
    _add_batches_and_page(parser)
    options = parser.parse_args(arguments)

    def find(tell: Tell) -> tuple[str, int]:
        names = {"A": options.a, "B": options.b, "INPUTS": options.inputs}
        if os.path.exists(options.a) and os.path.exists(options.b):
            traces = [Trace.open(path, tell) for path in names.values() if path is not None]
            tell("comparing")
            result = compare_traces(*traces, batches=options.batches, factor=options.factor)
        elif options.inputs is None or options.batches is not None:
            raise UseError(
                "A and B should be two traces that exist, or two models with INPUTS and without --batches"
            )
        else:
            tell("running the models")
            result = compare(*(imported(value, name) for name, value in names.items()), factor=options.factor)
        return rendered(result, options, tell), EQUAL_STATUS[result.equal]

    return answered("compare", find, errors=(TypeError, RuntimeError))


def diff_main(arguments: list[str]) -> int:
    """Run `nanwatch diff` and return the exit status."""
    what = "Name the first record in which two traces part, and what grew most from the one to the other."
    parser = command_parser("diff", what, _DIFF)
    parser.add_argument("a", metavar="A", help="a trace: what watch(trace=...) was given")
    parser.add_argument("b", metavar="B", nargs="?", help="another; without it --batches compares two of A")
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
    _add_batches_and_page(parser)
    options = parser.parse_args(arguments)

    def find(tell: Tell) -> tuple[str, int]:
        a = Trace.open(options.a, tell)
        b = None if options.b is None else Trace.open(options.b, tell)
        result = diff(a, b, batches=options.batches, rtol=options.rtol, ignore=options.ignore)
        return rendered(result, options, tell), EQUAL_STATUS[result.equal]

    return answered("diff", find)


def _add_batches_and_page(parser: Any) -> None:
    """Add the options that the comparisons of traces share."""
    parser.add_argument(
        "--batches",
        nargs=2,
        type=int,
        metavar=("N", "M"),
        help="of traces: batch N of A against batch M of B",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts too")


def twice_main(arguments: list[str]) -> int:
    """Run `nanwatch twice` and return the exit status."""
    what = (
        "Run a script twice, compare all that its modules and optimizers compute, bit for bit, and name the first"
        " module that is not repeatable and what cures it. Options go before the script."
    )
    parser = command_parser("twice", what, _TWICE)
    add_script(parser)
    parser.add_argument(
        "--batches",
        type=int,
        metavar="N",
        help="end each run after N calls of the model (default: at its end)",
    )
    parser.add_argument(
        "--times", type=int, metavar="N", default=2, help="number of runs to compare (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    target, rest, is_module = options.target, options.arguments, options.m
    if request := os.environ.pop(_VARIABLE, ""):
        return _record(json.loads(request), target, rest, is_module=is_module)

    def find(tell: Tell) -> tuple[str, int]:
        check_script(target, is_module=is_module)
        if options.times < 2 or (options.batches is not None and options.batches < 1):
            raise ValueError("--times should be at least 2 and --batches at least 1")
        command = [*(["-m"] if is_module else []), target, *rest]
        with tempfile.TemporaryDirectory(prefix="nanwatch-twice-") as folder:
            file = Path(folder, "recording.json")
            run = partial(_run, file=file, command=command, limit=options.batches)
            result = examine(run, os.path.basename(target), options.times, TRIALS, tell)
        if result.equal and result.error:
            raise UseError(f"the runs are bit-equal, but each ended by {result.error}")
        return rendered(result, options, tell), EQUAL_STATUS[result.equal]

    return answered("twice", find)


def _run(
    names: Sequence[str], most_batches: int | None, *, file: Path, command: list[str], limit: int | None
) -> Recording:
    """Run the script in a process and return its recording. Raise UseError when its model is never called."""
    limits = [most for most in (most_batches, limit) if most is not None]
    request = {"trials": names, "most_batches": min(limits, default=None), "file": str(file)}
    file.unlink(missing_ok=True)
    # A watch in the script would be before the calls that are to be recorded.
    environment = {**os.environ, "NANWATCH": "0", _VARIABLE: json.dumps(request)}
    for name in names:
        environment |= TRIALS[name].environment
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    interpreter = [sys.executable, *flags, "-m", "nanwatch", "twice", *command]
    done = subprocess.run(
        interpreter, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    if not file.exists():
        last = done.stderr.strip().rpartition("\n")[2] or "it printed nothing on stderr"
        raise UseError(f"the script ended by status {done.returncode}: {last}")
    recording = Recording(**json.loads(file.read_text(encoding="utf-8")))
    recording.tensors = [TensorPrint(*values) for values in recording.tensors]
    if len(recording.tensors) == bool(recording.error):
        why = recording.error or "it called no module and made no optimizer step in its own process"
        raise UseError(f"there is nothing to compare in {command[-1]}: {why}")
    if recording.error and names:
        raise RuntimeError(recording.error)
    return recording


def _record(request: dict[str, Any], target: str, arguments: list[str], *, is_module: bool) -> int:
    """Run the script in this process and write its recording."""
    process, status = os.getpid(), 0
    recorder = Recorder(request["most_batches"])
    with ExitStack() as trials:
        for name in request["trials"]:
            trials.enter_context(TRIALS[name].patch(recorder.recording.notes.append))
        with recorder.running() as recording:
            try:
                run_script(target, arguments, is_module=is_module)
            except EnoughError:
                pass
            except SystemExit as error:
                if error.code not in (None, 0):
                    recording.error = f"exit status {error.code}"
            except BaseException as error:
                traceback.print_exc()
                recording.error, status = spell(error), 1
    if recording.error:
        batch = max(recording.batches - 1, 0)
        recording.tensors.append(TensorPrint(batch, "result", "", "", "exception", recording.error, bits=0))
    if os.getpid() == process:  # else a forked child that has come to the script's end
        Path(request["file"]).write_text(json.dumps(vars(recording)), encoding="utf-8")
    return status
