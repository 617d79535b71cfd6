"""`nanwatch run SCRIPT [ARGS...]`: an unchanged training script with its model watched."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import inspect
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from io import open_code
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from torch import nn

from . import text
from .deferred import DeferredWatch
from .errors import BatchLimitError, NonFiniteError, spell
from .outermost import MAX_MODELS, Outermost
from .report import Report
from .visible import visible
from .watch import Watch, watch

_NONFINITE, _BAD_USE, _FAILED = 3, 2, 1
_NAME = "nanwatch run"
_NOTES = f"""\
Which model: the first module that is called from outside any other module and has parameters to train, in training
mode or known to an optimizer; or the module that holds it, as a LightningModule does. Models that are called later are
watched too, each by itself, up to {MAX_MODELS}.

stdout, arguments and exit status are the script's own. The report of a failure goes to stderr.

exit status:
  {_NONFINITE}  a value was not finite, and the script did not catch the error that says so
  {_BAD_USE}  the options make no sense, or there is no such script
  {_FAILED}  the script ended by an exception of its own
  otherwise the script's; 0 after --abort-after-batch

examples:
  nanwatch run train.py --lr 1e-3
  nanwatch run --output-dir nanwatch-out --on-nonfinite warn train.py --lr 1e-3
  nanwatch run --include 'encoder.*' --json report.json -m package.train --lr 1e-3
  nanwatch run --model GPT2LMHeadModel generate.py          a model that is not trained, by its class
  torchrun --nproc-per-node 2 -m nanwatch run train.py      each process watches its own
"""

_HELP = {
    "weights": "look at weights (on unless told)",
    "buffers": "look at buffers of floating point (on unless told)",
    "inputs": "look at inputs (on unless told)",
    "outputs": "look at outputs (on unless told)",
    "counts": "count zeros, subnormals, nans and infinities of every tensor, for --trace and reports; slow",
}
# Boolean options of `watch` become flags by themselves, but for those that mean something else here.
_NO_FLAG = ("enabled",)


def main(arguments: list[str]) -> int:
    """Runs the script; returns the exit status, or raises what the script left by: SystemExit, KeyboardInterrupt."""
    options = vars(_parser().parse_args(arguments))
    target, rest, is_module = options.pop("target"), options.pop("arguments"), options.pop("m")
    json_file, class_name = options.pop("json"), options.pop("model")
    try:
        # Before hours of training.
        DeferredWatch(options)
        if json_file is not None:
            json_file = _of_this_rank(json_file)
            json_file.open("a").close()
        if not is_module and not os.path.exists(target):
            raise ValueError(f"there is no script {target!r}; a module is run with -m")
    except (TypeError, ValueError, OSError, ImportError) as error:
        _tell(str(error))
        return _BAD_USE
    run = _Run(options, class_name)
    try:
        return run.run(target, rest, is_module=is_module)
    finally:
        run.finish(json_file)


class _Run:
    """A script, and the models that are watched in it."""

    def __init__(self, options: dict[str, Any], class_name: str | None) -> None:
        self._options = options
        self._class_name = class_name
        self._watches: list[tuple[str, Watch]] = []
        self._is_raised = False
        self._passed_over: list[str] = []

    def run(self, target: str, arguments: list[str], *, is_module: bool) -> int:
        """Run it. Returns the exit status, or raises as `main` says."""
        outermost = Outermost(self._found, self._class_name)
        try:
            with outermost, _as_main(target, arguments, is_module=is_module):
                if is_module:
                    runpy.run_module(target, run_name="__main__", alter_sys=True)
                elif os.path.isfile(target) and target.endswith((".py", ".pyw")):
                    _run_file(target)
                else:  # a folder or a zip file with a __main__.py, or a compiled file
                    runpy.run_path(target, run_name="__main__")
        except NonFiniteError as error:
            self._is_raised = True
            _show(error)
            return _NONFINITE
        except BatchLimitError as error:
            _tell(str(error))
            return 0
        except Exception as error:
            _show(error)
            return _FAILED
        finally:
            self._passed_over = list(outermost.passed_over)
        return 0

    def _found(self, model: nn.Module) -> None:
        try:
            self._watches.append((type(model).__name__, watch(model, **self._options)))
        except (TypeError, ValueError) as error:
            # Such as a pattern that matches no module of this model; the script is not to pay for it.
            _tell(f"{type(model).__name__} is not watched: {error}")

    def finish(self, json_file: Path | None) -> None:
        """Stop to watch, and say on stderr and in the file what was seen."""
        reports = [one.report() for _, one in self._watches]
        for _, one in self._watches:
            one.stop()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        if not self._watches:
            _tell(self._nothing())
        for (name, one), report in zip(self._watches, reports, strict=True):
            _tell(_line(name, one, report))
        failed = [report for report in reports if report.finding is not None]
        if failed and not self._is_raised:
            print(failed[0].to_text(), file=sys.stderr)
        if json_file is not None:
            report = (failed or reports or [Report((), None, None, 0)])[0]
            try:
                json_file.write_text(report.to_json() + "\n", encoding="utf-8")
            except OSError as error:
                _tell(f"{json_file} could not be written: {spell(error)}")

    def _nothing(self) -> str:
        seen = ", ".join(self._passed_over)
        if not seen:
            return "nothing was watched: no module was called"
        wanted = f"of class {self._class_name!r}" if self._class_name else "with parameters to train"
        return (
            f"nothing was watched: no module {wanted} was called, only such as {seen};"
            " name the class of the model with --model"
        )


def _line(name: str, one: Watch, report: Report) -> str:
    batches = 0 if one.batch is None else one.batch + 1
    amount = f"{batches} batch{'' if batches == 1 else 'es'} of {name}"
    if report.finding is not None:
        return f"{amount}: {text.summary(report.finding)}"
    if not one.counters["tensors"]:
        return f"{amount}: nothing was looked at" + (
            ", as NANWATCH=0 says" if os.environ.get("NANWATCH") == "0" else ""
        )
    return f"{amount}: all that was read is finite"


def _tell(message: str) -> None:
    print(visible(f"{_NAME}: {message}"), file=sys.stderr, flush=True)


def _show(error: Exception) -> None:
    """What the interpreter would print of an exception of the script, which has no frames of ours."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    own = (__file__, runpy.__file__, "<frozen runpy>")
    place: TracebackType | None = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename in own:
        place = place.tb_next
    error.__traceback__ = place
    try:
        sys.excepthook(type(error), error, place)
    except Exception:
        traceback.print_exc()
    if isinstance(error, NonFiniteError) and sys.excepthook is not sys.__excepthook__:
        # A hook of the script's own may have shown it in another way, or not at all.
        print(error.report.to_text(), file=sys.stderr, flush=True)


def _of_this_rank(path: str) -> Path:
    """The file as named, and for the processes of torchrun other than the first with the rank in its name."""
    rank = os.environ.get("RANK", "0")
    plain = Path(path)
    return plain if rank in ("", "0") else plain.with_name(f"{plain.stem}-rank-{rank}{plain.suffix}")


def _run_file(target: str) -> None:
    """What runpy.run_path does, but `__file__` is absolute and sys.argv[0] as given, as with `python SCRIPT`."""
    path = os.path.abspath(target)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins)
    before, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        with open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    finally:
        sys.modules["__main__"] = before


@contextlib.contextmanager
def _as_main(target: str, arguments: list[str], *, is_module: bool) -> Iterator[None]:
    """sys.argv and sys.path as `python SCRIPT` and `python -m MODULE` make them."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [target, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        # A folder or a zip file with a __main__.py is put there by runpy.
        first = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
        sys.path[:1] = [first]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nanwatch run",
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
        "--output-dir", metavar="DIR", help="where each failure's report and capsule are written"
    )
    parser.add_argument(
        "--on-nonfinite", choices=("raise", "warn", "record"), default="raise", help="what to do then (raise)"
    )
    parser.add_argument(
        "--check", choices=("auto", "module", "batch"), default="auto", help="when to act (auto)"
    )
    parser.add_argument(
        "--max-frames", type=int, default=21, metavar="N", help="how many frames to keep (21)"
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="look at every N batches only (1)")
    parser.add_argument(
        "--reread-weights",
        type=int,
        default=64,
        metavar="N",
        help="read unchanged weights after N batches (64)",
    )
    for option, what in (
        ("include", "watch only modules whose name matches"),
        ("exclude", "leave out modules whose name matches"),
        ("allow-inf", "modules whose infinities are meant"),
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
        help="write every frame into this Parquet file, as 'show' and 'diff' read it",
    )
    parser.add_argument(
        "--log-to", metavar="DIR", help="log headroom, ranges and forecasts for TensorBoard into this folder"
    )
    parser.add_argument(
        "--log-every", type=int, default=50, metavar="N", help="with --log-to: one in N batches (50)"
    )
    parser.add_argument(
        "--max-skipped-steps",
        type=int,
        default=20,
        metavar="N",
        help="with --gradients: act when GradScaler has skipped more than N steps in a row (20)",
    )
    parser.add_argument(
        "--peer-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="with several ranks: wait at most S seconds for all to agree on where it began, 0 for none (30)",
    )
    parser.add_argument("--abort-after-batch", type=int, metavar="N", help="stop after this batch")
    parser.add_argument(
        "--microscope",
        action=argparse.BooleanOptionalAction,
        help="run a failed batch once more to find the operation and try cures (when it raises)",
    )
    for option, parameter in inspect.signature(watch).parameters.items():
        if isinstance(parameter.default, bool) and not option.startswith("_") and option not in _NO_FLAG:
            parser.add_argument(
                f"--{option.replace('_', '-')}",
                action=argparse.BooleanOptionalAction,
                default=parameter.default,
                help=_HELP.get(option, f"as {option}= of nanwatch.watch"),
            )
    return parser


def _numbers(value: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in value.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} should be batch numbers such as 0,3") from None
