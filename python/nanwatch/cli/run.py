"""`nanwatch run SCRIPT [ARGS...]`: run an unchanged training script and watch its model."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import os
import re
import runpy
import sys
import threading
import traceback
from dataclasses import Field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..blackbox.process import process_box
from ..report import text
from ..report.report import NonFiniteError
from ..session import model_finder
from ..session.api import GIVEN, OPTIONS, TEXTS, Options, Watch, make_options, start_watch
from ..session.kinds import flag, flag_or_none, parts
from ..session.model_finder import MAX_MODELS, ModelFinder
from ..util.messages import spell, visible
from .commands import Parser, UseError

_DEFAULTS = {**GIVEN, "black_box": True}
# Exit statuses.
NONFINITE, BAD_USE, FAILED = 3, 2, 1
_NOTES = f"""\
Which models: each module with weights or buffers that is called from outside any other module, or the module that
holds it, as a LightningModule does; up to {MAX_MODELS}, each watched by itself.

stdout, arguments and exit status are the script's own. The report of a failure goes to stderr.

exit status:
  {NONFINITE}  a value was not finite, and the script did not catch the error that says so
  {BAD_USE}  the options make no sense, there is no such script, or a pattern matches nothing
  {FAILED}  the script ended by an exception of its own
  otherwise the script's own, 0 when it ends well

examples:
  nanwatch run train.py --lr 1e-3
  nanwatch run --output-dir nanwatch-out --on-nonfinite warn train.py --lr 1e-3
  nanwatch run --modules 'encoder.*' -m package.train --lr 1e-3
  torchrun --nproc-per-node 2 -m nanwatch run train.py      each process watches its own
"""
_NOTHING = (
    "nothing was watched: no call of a module with weights or buffers was seen. Models that the script watches itself"
    " are left alone; calls in a compiled function or in another process are not seen"
)
_NONFINITE_ERROR = re.compile(r"\bnanwatch\.[\w.]+NonFiniteError\b")
# Files whose frames lie between the command and the script in a traceback.
_FILES = (__file__, model_finder.__file__, runpy.__file__, "<frozen runpy>")


def main(arguments: list[str]) -> int:
    """Run the script. Return the exit status, or raise the script's SystemExit or KeyboardInterrupt."""
    values = vars(run_parser().parse_args(arguments))
    target, rest, is_module = values.pop("target"), values.pop("arguments"), values.pop("m")
    try:
        options = make_options({**_DEFAULTS, **values})  # before hours of training
        check_script(target, is_module=is_module)
    except (TypeError, ValueError, OSError, ImportError) as error:
        _tell(str(error))
        return BAD_USE
    return _Run(options).run(target, rest, is_module)


def run_parser() -> argparse.ArgumentParser:
    """Return the parser of `nanwatch run`."""
    what = "Run an unchanged training script and watch its model. Options go before the script."
    parser = Parser("run", what, _NOTES)
    add_script(parser)
    group = parser.add_argument_group("options of watch")
    for option in OPTIONS.values():
        if option.name != "optimizer":  # which only code has
            _add_flag(group, option)
    return parser


def _add_flag(group: argparse._ArgumentGroup, option: Field[Any]) -> None:
    default, text = _DEFAULTS[option.name], TEXTS.get(option.name, "")
    how: dict[str, Any] = {"metavar": option.metadata["metavar"]}
    if option.metadata["kind"] in (flag, flag_or_none):
        how = {"action": argparse.BooleanOptionalAction}
    elif default == ():
        how |= {"action": "extend", "type": parts}
        text = "; ".join(filter(None, [text, "may be repeated"]))
    if default not in (None, False, ()):
        text += f" (default: {'on' if default is True else default})"
    name, text = f"--{option.name.replace('_', '-')}", text.replace("%", "%%")
    group.add_argument(name, default=argparse.SUPPRESS, help=text, **how)


# The script


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add SCRIPT, its arguments and -m to the parser of a command that runs a script."""
    parser.allow_abbrev = False
    parser.usage = "%(prog)s [OPTION...] SCRIPT [ARG...]\n       %(prog)s [OPTION...] -m MODULE [ARG...]"
    parser.add_argument("target", metavar="SCRIPT", help="the script, or with -m the module")
    rest = parser.add_argument("arguments", metavar="ARG", nargs=argparse.REMAINDER, help="its own arguments")
    rest.required = False  # argparse would name it beside a missing SCRIPT
    parser.add_argument("-m", action="store_true", help="run a module, as `python -m` does")


def check_script(target: str, *, is_module: bool) -> None:
    """Raise ValueError where there is no such script. Only `run_script` knows whether there is a module."""
    if not is_module and not os.path.isfile(target):
        raise ValueError(f"there is no script {target!r}; a module is run with -m")


def run_script(target: str, arguments: list[str], *, is_module: bool) -> None:
    """Run a script or a module. Raise what it raises.

    `__main__`, sys.argv and sys.path stay the script's until the process ends, as with `python SCRIPT`: its threads,
    its atexit functions and late child processes need them. Raises UseError where there is no such module.
    """
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.argv = [target, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))]
    if not is_module:
        main.__file__ = path = os.path.abspath(target)
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))
        return
    # The interpreter calls this for `python -m`. runpy.run_module would put another __main__ back.
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
    try:
        run(target)
    except SystemExit as left:
        error = left.__context__  # runpy's own: the module was not found, and nothing has run
        if type(error) is runpy._Error and str(error).startswith("No module named"):  # type: ignore[attr-defined]
            raise UseError(str(error)) from None
        raise


# The run


class _Run:
    """Run of a script, and the watches of its models."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._watches: list[tuple[str, Watch]] = []
        self._status = 0  # if it is another, it replaces the script's own exit status
        self._is_reported = False
        self._finder = ModelFinder(self._model_called)

    def run(self, target: str, arguments: list[str], is_module: bool) -> int:
        """Run the script, and report. Return the exit status, or raise as `main` does."""
        process, before = os.getpid(), threading.excepthook
        has_failed, left = False, None

        def hook(args: threading.ExceptHookArgs, /) -> None:
            # An error that ends a thread of the script decides about the exit status too.
            if args.exc_value is not None:
                self._note(args.exc_value)
            before(args)

        threading.excepthook = hook
        try:
            with self._finder:
                run_script(target, arguments, is_module=is_module)
        except UseError as error:
            self._refuse(str(error))
        except Exception as error:
            self._note(error)
            _show(error)
            has_failed = True
        except BaseException as error:  # SystemExit, KeyboardInterrupt
            left = error
            if not isinstance(error, SystemExit):
                _show(error)
        if threading.excepthook is hook:
            threading.excepthook = before
        if os.getpid() == process:  # else a forked child has come to the script's end
            self._finish(has_failed)
        status = (os.getpid() == process and self._status) or (FAILED if has_failed else 0)
        if left is not None and status == 0:
            if not isinstance(left, SystemExit):  # it was shown
                sys.excepthook = lambda *_: None
            raise left
        return status

    def _refuse(self, message: str) -> None:
        _tell(message)
        self._status = BAD_USE

    def _note(self, error: BaseException) -> None:
        """Note an error that the script did not catch."""
        if (box := process_box()) is not None:
            box.error = error
        # With the errors in its chain and in its group, and from Python 3.11 on with their notes.
        words = "".join(traceback.format_exception(error, limit=0))
        if _NONFINITE_ERROR.search(words):
            self._status = NONFINITE
        # The script's own hook may show an error in another way, or not at all.
        if getattr(sys.excepthook, "__module__", "") in ("sys", "torch.distributed.distributed_c10d"):
            self._is_reported |= " first seen in `" in words

    def _model_called(self, model: nn.Module) -> None:
        name = type(model).__name__
        # Patterns that match no module of the first model that is trained are a mistake.
        must_match = not self._watches and any(x.requires_grad for x in model.parameters())
        try:
            self._watches.append((name, start_watch(model, self._options, must_match=must_match)))
        except (TypeError, ValueError, OSError) as error:
            if isinstance(error, TypeError) or not must_match:  # a ScriptModule, which the user has not named
                return _tell(f"{name} is not watched: {error}")
            parts = ", ".join([part for part, _ in model.named_children()][:8])
            modules = f", whose modules are {parts}" if parts else ""
            self._refuse(f"{error}. The first model that was called is {name}{modules}")
            # SystemExit, because the script may catch every Exception.
            raise SystemExit(BAD_USE) from None

    def _finish(self, has_failed: bool) -> None:
        """Stop the watches, and report on stderr. `has_failed`: an exception ended the script."""
        for name, watch in self._watches:
            try:
                watch.report()  # before `stop`: warns of modules whose calls are not seen
                watch.stop()
            except NonFiniteError as error:  # of the weights after the last step
                self._note(error)
                _show(error.with_traceback(None))
            except Exception as error:  # the others are stopped all the same
                _tell(f"an error came while the watch of {name} was ended: {spell(error)}")
        _flush_stdout()
        if not self._watches and self._status != BAD_USE:
            _tell(_NOTHING)
        failed = []
        for name, watch in self._watches:
            trace = "" if watch.trace_path is None else f"; trace: {watch.trace_path}"
            _tell(_closing_line(name, watch) + trace)
            report = watch.report()
            if report.finding is not None:
                failed.append(report)
                # The script's own check may have found the value before nanwatch.
                if has_failed and report.batch == watch.batch == watch._failures.exception_batch:
                    self._status = self._status or NONFINITE
        if self._finder.num_left <= 0:
            _tell(f"{MAX_MODELS} models were found; those that were called later were not looked for")
        if failed and not self._is_reported:
            _print_error(failed[0].to_text())


def _closing_line(name: str, watch: Watch) -> str:
    batches = 0 if watch.batch is None else watch.batch + 1
    amount = f"{batches} batch{'' if batches == 1 else 'es'} of {name}"
    if (finding := watch.report().finding) is not None:
        return f"{amount}: {text.summary(finding)}"
    if not watch.counters["tensors"]:
        why = ", as NANWATCH=0 says" if os.environ.get("NANWATCH") == "0" else ""
        return f"{amount}: nothing was looked at{why}"
    if watch.batch == watch._failures.exception_batch:
        return f"{amount}, the last ended by an exception: what that call computed last was not read"
    harmless = []  # non-finite gradients that have reached no weight
    if count := watch.counters["skipped_steps"]:
        step = watch.skipped_steps[-1]
        scale = f" ({step.note.text})" if step.note.text else ""
        last = f"{text.summary(step.finding)}{scale}"
        harmless.append(f"skipped steps, as gradients were not finite: {count:,}, the last: {last}")
    if count := watch.counters["untaken_backwards"]:
        harmless.append(f"non-finite backwards whose steps took finite gradients: {count:,}")
    if harmless:
        return f"{amount}: {'; '.join(harmless)}; all else that was read is finite"
    return f"{amount}: all that was read is finite"


def _tell(message: str) -> None:
    _print_error(visible(f"nanwatch run: {message}"))


def _print_error(text: str) -> None:
    if sys.stderr is not None:  # print would take None for stdout
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def _flush_stdout() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, None, or an object without flush
        sys.stdout.flush()


def _show(error: BaseException) -> None:
    """Print an exception of the script as the interpreter would, without the frames that led to the script."""
    _flush_stdout()
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename in _FILES:
        place = place.tb_next
    error.__traceback__ = place
    try:
        sys.excepthook(type(error), error, place)
    except SystemExit:
        pass  # the status says more
    except Exception:
        traceback.print_exc()
