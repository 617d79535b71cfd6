"""`nanwatch run SCRIPT [ARGS...]`: run an unchanged training script and watch its model."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import Field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from torch import nn

from ..blackbox.process import box_folder, process_box
from ..report import text
from ..report.report import NonFiniteError, Report
from ..session.api import Watch, start_watch
from ..session.model_finder import MAX_MODELS, ModelFinder
from ..session.options import OPTIONS, Options, flag, flag_or_none, make_options, parts
from ..util.visible import spell, suppressed, visible
from .parent import run_with_parent
from .script import FILES, add_script, check_script, misplaced_hint, run_script

_NAME = "nanwatch run"
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
  nanwatch run --modules 'encoder.*' --json report.json -m package.train --lr 1e-3
  nanwatch run --model GPT2LMHeadModel generate.py          only the models of this class
  torchrun --nproc-per-node 2 -m nanwatch run train.py      each process watches its own
"""


def main(arguments: list[str]) -> int:
    """Run the script. Return the exit status, or raise the script's SystemExit or KeyboardInterrupt."""
    parser = run_parser()
    values = vars(parser.parse_args(arguments))
    target, rest, is_module = values.pop("target"), values.pop("arguments"), values.pop("m")
    json_file, class_name, has_parent = (values.pop(name) for name in ("json", "model", "parent"))
    try:
        # Before hours of training.
        options = make_options({"black_box": True, **values})
        if json_file is not None:
            json_file = _of_this_rank(json_file)
            json_file.open("a").close()
        check_script(target, is_module=is_module)
    except (TypeError, ValueError, OSError, ImportError) as error:
        _tell(str(error))
        return BAD_USE
    if hint := misplaced_hint(parser, target, rest):
        _tell(hint)

    def run() -> int:
        return _status_of(_Run(options, class_name), target, rest, is_module, json_file)

    if not has_parent:
        return run()
    return run_with_parent(run, box_folder(options.output_dir))


def _status_of(run: _Run, target: str, rest: list[str], is_module: bool, json_file: Path | None) -> int:
    status, left = 0, None
    try:
        status = run.run(target, rest, is_module=is_module)
    except BaseException as error:
        left = error
    status = run.finish(json_file, has_failed=status == FAILED) or status
    left = left or run.interrupt
    if left is not None and status == 0:
        raise left
    return status


def run_parser() -> argparse.ArgumentParser:
    """Return the parser of `nanwatch run`."""
    parser = argparse.ArgumentParser(
        prog=_NAME,
        description="Run an unchanged training script and watch its model. Options go before the script.",
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_script(parser)
    parser.add_argument(
        "--model", metavar="CLASS", help="watch modules of this class (a pattern), trained or not"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the report as JSON when the script has ended; /dev/fd/3 for a descriptor",
    )
    parser.add_argument(
        "--parent",
        action="store_true",
        help="run the script in a child process, and write into its black box which signal ended it, SIGKILL too",
    )
    group = parser.add_argument_group("options of watch")
    for option in OPTIONS.values():
        if option.name != "optimizer":  # which only code has
            _add_flag(group, option)
    return parser


def _add_flag(group: argparse._ArgumentGroup, option: Field[Any]) -> None:
    text, how = option.metadata["text"], {"metavar": option.metadata["metavar"]}
    if option.metadata["kind"] in (flag, flag_or_none):
        how = {"action": argparse.BooleanOptionalAction}
    elif option.default == ():
        how |= {"action": "extend", "type": parts}
        text += "; may be repeated"
    if option.default not in (None, False, ()):
        default = " ".join(option.default) if isinstance(option.default, tuple) else option.default
        text += f" (default: {'on' if default is True else default})"
    group.add_argument(
        f"--{option.name.replace('_', '-')}", default=argparse.SUPPRESS, help=text.replace("%", "%%"), **how
    )


class _Run:
    """Run of a script, and the watches of its models."""

    def __init__(self, options: Options, class_name: str | None) -> None:
        self._options = options
        self._class_name = class_name
        self._watches: list[tuple[str, Watch]] = []
        self.interrupt: BaseException | None = None  # Ctrl-C while the watches were ended
        # If it is not 0, it replaces the script's own exit status.
        self._status = 0
        self._is_reported = False
        self._notes = ""
        self._not_watched: list[str] = []
        self._finder = ModelFinder(self._found, class_name, self._unmatched)
        self._process = os.getpid()

    def run(self, target: str, arguments: list[str], *, is_module: bool) -> int:
        """Run the script. Return the exit status, or raise as `main` does."""
        try:
            with self._finder, self._threads():
                run_script(target, arguments, is_module=is_module)
        except Exception as error:
            self._meet(error)
            _show(error)
            return FAILED
        return 0

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """Let an error that ends a thread of the script decide about the exit status too."""
        before = threading.excepthook

        def hook(args: threading.ExceptHookArgs, /) -> None:
            if args.exc_value is not None:
                self._meet(args.exc_value)
            before(args)

        threading.excepthook = hook
        try:
            yield
        finally:
            if threading.excepthook is hook:
                threading.excepthook = before

    def _meet(self, error: BaseException) -> None:
        """Note an error that the script did not catch."""
        if (box := process_box()) is not None:
            box.error = error
        if _nonfinite_in(error) is not None:
            self._status = NONFINITE
            self._is_reported = True
        if hasattr(error, "add_note"):  # from Python 3.11 on notes are printed under the traceback
            self._notes += "\n".join(map(str, getattr(error, "__notes__", ())))

    def _found(self, model: nn.Module) -> None:
        name = type(model).__name__
        # Patterns that match no module of the first model that is trained are a mistake.
        must_match = not self._watches and any(x.requires_grad for x in model.parameters())
        try:
            self._watches.append((name, start_watch(model, self._options, must_match=must_match)))
        except (
            TypeError,
            ValueError,
            OSError,
        ) as error:  # TypeError: a ScriptModule, which the user has not named
            if isinstance(error, TypeError) or not must_match:
                self._not_watched.append(name)
                _tell(f"{name} is not watched: {error}")
                return
            parts = ", ".join([part for part, _ in model.named_children()][:8])
            self._refuse(
                f"{error}. The first model that was called is {name}"
                + (f", whose modules are {parts}" if parts else "")
                + "; name the class of another one with --model"
            )

    def _unmatched(self, class_names: list[str]) -> None:
        shown = ", ".join(class_names[:8]) + (", ..." if len(class_names) > 8 else "")
        self._refuse(
            f"--model {self._class_name!r} matches the class of no module that there is; the models are {shown}."
            " Without --model each model is watched"
        )

    def _refuse(self, why: str) -> NoReturn:
        _tell(why)
        self._status = BAD_USE
        # SystemExit, because the script may catch every Exception.
        raise SystemExit(BAD_USE)

    def finish(self, json_file: Path | None, *, has_failed: bool) -> int:
        """Stop the watches, and report on stderr and in the file.

        `has_failed`: an exception ended the script. Return the exit status that replaces the script's, or 0.
        """
        if os.getpid() != self._process:  # a forked child that has come to the script's end
            return 0
        reports = [self._end(name, one) for name, one in self._watches]
        _flush_stdout()
        if not self._watches and self._status != BAD_USE:
            _tell(self._why_nothing())
        for (name, one), report in zip(self._watches, reports, strict=True):
            _tell(_line(name, one, report) + self._trace_words(one))
            if (
                has_failed
                and one._ended_by_exception
                and report.finding is not None
                and report.batch == one.batch
            ):
                # The script's own check may have found the value before nanwatch.
                self._status = self._status or NONFINITE
        if self._finder.is_full:
            _tell(f"{MAX_MODELS} models were found; those that were called later were not looked for")
        failed = [report for report in reports if report.finding is not None]
        first = failed[0].finding if failed else None
        if first is not None and not self._is_reported and text.summary(first) not in self._notes:
            _print_error(failed[0].to_text())
        if json_file is not None:
            report = (failed or reports or [Report((), None, None, 0)])[0]
            try:
                json_file.write_text(report.to_json() + "\n", encoding="utf-8")
            except (OSError, ValueError) as error:
                _tell(f"{json_file} could not be written: {spell(error)}")
        return self._status

    def _trace_words(self, one: Watch) -> str:
        path, trace = one.trace_path, self._options.trace
        if path is None or trace is None:
            return ""
        asked = Path(trace.path)
        return f"; trace: {path}" + (
            f", as {asked.name} was there" if path != asked and asked.exists() else ""
        )

    def _end(self, name: str, one: Watch) -> Report:
        """Stop a watch, whatever it raises, and return the report."""
        try:
            one.report()  # before `stop`: warns of modules whose calls are not seen
            one.stop()
        except NonFiniteError as error:  # from a row that came late
            self._meet(error)
            _show(error.with_traceback(None))
        except BaseException as error:  # the others are stopped all the same
            _tell(f"an error came while the watch of {name} was ended: {spell(error)}")
            if not isinstance(error, Exception):
                self.interrupt = error
        return one.report()

    def _why_nothing(self) -> str:
        """Return the reason why there is no watch."""
        if own := ", ".join(self._finder.watched_already):
            return f"the script watches its model itself ({own}): nothing was added"
        if self._finder.trouble:
            why = f"the search for models ended by {self._finder.trouble}"
        elif self._not_watched:
            why = f"{', '.join(self._not_watched)} cannot be, as said above"
        elif seen := ", ".join(self._finder.passed_over):
            wanted = f"of class {self._class_name!r}" if self._class_name else "with weights or buffers"
            why = f"no module {wanted} was called, only such as {seen}; name the class of the model with --model"
        else:
            why = "no call of a module was seen; those in a compiled function or in another process are not"
        return f"nothing was watched: {why}"


def _line(name: str, one: Watch, report: Report) -> str:
    batches = 0 if one.batch is None else one.batch + 1
    amount = f"{batches} batch{'' if batches == 1 else 'es'} of {name}"
    if report.finding is not None:
        return f"{amount}: {text.summary(report.finding)}"
    if not one.counters["tensors"]:
        return f"{amount}: nothing was looked at" + (
            ", as NANWATCH=0 says" if os.environ.get("NANWATCH") == "0" else ""
        )
    if one._ended_by_exception:
        return f"{amount}, the last ended by an exception: what that call computed last was not read"
    if faults := list(_harmless(one)):
        return f"{amount}: {'; '.join(faults)}; all else that was read is finite"
    return f"{amount}: all that was read is finite"


def _harmless(one: Watch) -> Iterator[str]:
    """Yield sentences of non-finite gradients that have reached no weight."""
    counters = one.counters
    if count := counters["skipped_steps"]:
        step = one.skipped_steps[-1]
        scale = f" ({step.note.text})" if step.note.text else ""
        steps = "1 step was" if count == 1 else f"{count:,} steps were"
        yield f"{steps} skipped, as gradients were not finite; the last: {text.summary(step.finding)}{scale}"
    if count := counters["untaken_backwards"]:
        backwards = "1 backward was" if count == 1 else f"{count:,} backwards were"
        yield f"{backwards} not finite, but the steps took finite gradients"


def _nonfinite_in(error: BaseException) -> NonFiniteError | None:
    """Return the NonFiniteError that `error` is, was raised from or while handling, or has in its group, if any."""
    seen: set[int] = set()
    ahead: list[BaseException | None] = [error]
    while ahead:
        raised = ahead.pop()
        if isinstance(raised, NonFiniteError):
            return raised
        if raised is not None and id(raised) not in seen:
            seen.add(id(raised))
            ahead += [raised.__cause__, None if raised.__suppress_context__ else raised.__context__]
            ahead += getattr(raised, "exceptions", ())
    return None


def _tell(message: str) -> None:
    _print_error(visible(f"{_NAME}: {message}"))


def _print_error(text: str) -> None:
    if sys.stderr is not None:  # print would take None for stdout
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def _flush_stdout() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, None, or an object without flush
        sys.stdout.flush()


def _show(error: Exception) -> None:
    """Print an exception of the script as the interpreter would, without nanwatch's frames."""
    _flush_stdout()
    files = (__file__, *FILES)
    place: TracebackType | None = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename in files:
        place = place.tb_next
    error.__traceback__ = place
    frame = place
    while frame is not None:  # the ModelFinder's call of a model stands in the middle
        while frame.tb_next is not None and frame.tb_next.tb_frame.f_code.co_filename in files:
            frame.tb_next = frame.tb_next.tb_next
        frame = frame.tb_next
    try:
        sys.excepthook(type(error), error, place)
    except Exception:
        suppressed("the script's sys.excepthook raised")
        traceback.print_exc()
    finally:
        nonfinite = _nonfinite_in(error)
        if nonfinite is not None and _user_hook() is not sys.__excepthook__:
            # The script's own hook may have shown it in another way, or not at all.
            _print_error(nonfinite.report.to_text())


def _user_hook() -> Any:
    """Return the hook below those of torch.distributed, which put the rank before each line."""
    hook: Any = sys.excepthook
    while getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook")
    return hook


def _of_this_rank(path: str) -> Path:
    """Return the path, with the rank in its name for all processes of torchrun but the first."""
    rank = os.environ.get("RANK", "0")
    plain = Path(path).absolute()  # the script may change its folder
    return plain if rank in ("", "0") else plain.with_name(f"{plain.stem}-rank-{rank}{plain.suffix}")
