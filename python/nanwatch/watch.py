"""`watch`: hooks on a model, frames in a recorder, and what to do when a value is not finite."""

from __future__ import annotations

import difflib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from . import text
from .errors import BatchLimitError, NonFiniteError
from .finding import find
from .frame import Frame, FrameRows
from .hooks import Call, Hooks
from .observe import observe
from .record import MASK, Row, to_record
from .recorder import Recorder
from .report import Report
from .walk import call_leaves, leaves

OnNonfinite: TypeAlias = "Literal['raise', 'warn', 'record'] | Callable[[Report], object]"
_ACTIONS = ("raise", "warn", "record")


class _Options(NamedTuple):
    """The options of `watch`, checked."""

    max_frames: int
    on_nonfinite: OnNonfinite
    weights: bool
    buffers: bool
    inputs: bool
    outputs: bool
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    every: int
    trace_batches: frozenset[int]
    abort_after_batch: int | None


def watch(
    model: nn.Module,
    *,
    max_frames: int = 21,
    on_nonfinite: OnNonfinite = "raise",
    weights: bool = True,
    buffers: bool = True,
    inputs: bool = True,
    outputs: bool = True,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    every: int = 1,
    trace_batches: Iterable[int] = (),
    abort_after_batch: int | None = None,
    **unknown: object,
) -> Watch:
    """Start to watch `model` and return the Watch, which is also a context manager.

    - max_frames: how many of the latest frames to keep. - on_nonfinite: "raise" a NonFiniteError from the
    faulty call, "warn" once for each run of faulty batches, only
      "record", or a callable that gets the Report of each faulty batch.
    - weights, buffers, inputs, outputs: which tensors to look at; of the buffers, those of floating point.
    - include, exclude: glob patterns on the names of modules, such as "encoder.block.*"; `*` crosses dots.
    - every: look at every so many batches only.
    - trace_batches: numbers of batches, from 0, whose frames are printed as they come.
    - abort_after_batch: raise BatchLimitError when the batch of this number is done.

    Raises TypeError or ValueError, naming what was given and what is accepted, when `model` is not a module
    whose submodules can be hooked, or an option is unknown or means nothing.
    """
    if unknown:
        name = next(iter(unknown))
        close = difflib.get_close_matches(name, _Options._fields, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"watch() has no option {name!r}; it accepts {', '.join(_Options._fields)}{hint}")
    _check_model(model)
    flags = {"weights": weights, "buffers": buffers, "inputs": inputs, "outputs": outputs}
    for option, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{option} should be True or False, got {flag!r}")
    if not any(flags.values()):
        raise ValueError("weights, buffers, inputs and outputs are all False; leave one of them True")
    if not callable(on_nonfinite) and on_nonfinite not in _ACTIONS:
        raise ValueError(
            f'on_nonfinite should be "raise", "warn", "record" or a callable that takes the Report,'
            f" got {on_nonfinite!r}"
        )
    options = _Options(
        max_frames=_whole("max_frames", max_frames, 1),
        on_nonfinite=on_nonfinite,
        **flags,
        include=_patterns("include", include),
        exclude=_patterns("exclude", exclude),
        every=_whole("every", every, 1),
        trace_batches=_batches("trace_batches", trace_batches),
        abort_after_batch=(
            None if abort_after_batch is None else _whole("abort_after_batch", abort_after_batch, 0)
        ),
    )
    return Watch(model, options)


class Watch:
    """A model being watched, from its construction by `watch` to `stop()`.

    The model computes what it computed before; no tensor is kept alive and no graph is built. In a copy or a
    pickle of the model nothing is watched.
    """

    def __init__(self, model: nn.Module, options: _Options) -> None:
        self._options = options
        self._recorder = Recorder(options.max_frames)
        self._batch: int | None = None
        # What the batches under way (one in each thread) were called with, to tell bad data from a bad layer;
        # weak, as the caller may drop it.
        self._given: dict[int, list[tuple[str, weakref.ref[Tensor]]]] = {}
        # The report of the first of the latest run of faulty batches; `_faulty` is the latest faulty batch.
        self._failure: Report | None = None
        self._faulty: int | None = None
        self._run_is_open = False

        modules = list(model.named_modules())
        observed = _select([name for name, _ in modules], options.include, options.exclude)
        # The root is hooked in any case, as it marks where a batch begins.
        hooked = [(name, module) for name, module in modules if name in observed or name == ""]
        self._hooks = Hooks(hooked, observed, self)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the hooks off the model; the frames stay. A second time does nothing."""
        self._hooks.remove()

    @property
    def batch(self) -> int | None:
        """The number of the latest batch, counted from 0; None before the first."""
        return self._batch

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The latest frames, oldest first, at most `max_frames`."""
        return self._recorder.frames

    def report(self) -> Report:
        """The report of the latest failure, or of the latest frames when there was none.

        When several batches on end were faulty it is the report of the first of them, as it was at its first
        non-finite value: what came later is its consequence.
        """
        return self._failure or Report(self.frames, None, self._batch, _rank())

    # What follows is called by the hooks.

    def batch_started(self, batch: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of what the batch is called with."""
        self._batch = batch
        if batch % self._options.every == 0:
            given = call_leaves(args, kwargs)
            self._given[batch] = [(label, weakref.ref(x)) for label, x in given if isinstance(x, Tensor)]
            if batch in self._options.trace_batches:
                _print_lines(text.batch_lines(batch))

    def call_returned(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record the call's frame; when something in it is not finite, do as `on_nonfinite` says."""
        if call.batch % self._options.every != 0:
            return
        rows = self._rows(module, args, kwargs, output)
        frame = FrameRows(call.batch, call.name, type(module).__name__, rows, call.recomputed)
        self._recorder.add(frame)
        if call.batch in self._options.trace_batches:
            _print_lines(text.frame_lines(frame.to_frame()))
        # Once a batch: whatever follows the first non-finite value of a batch follows from it.
        if self._faulty != call.batch and any(row[6] is False and row[8] != MASK for row in rows):
            self._fail(call)

    def batch_ended(self, batch: int, completed: bool) -> None:
        """Forget what the batch was called with; end the run when asked to."""
        self._given.pop(batch, None)
        if batch % self._options.every == 0 and completed and self._faulty != batch:
            self._run_is_open = False
        if completed and batch == self._options.abort_after_batch:
            raise BatchLimitError(batch, "abort_after_batch")

    def _rows(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> list[Row]:
        rows: list[Row] = []
        if self._options.weights:
            rows += [observe(x, name, "weight") for name, x in own_tensors(module._parameters)]
        if self._options.buffers:
            for name, x in own_tensors(module._buffers):
                if x.is_floating_point() or x.is_complex():
                    rows.append(observe(x, name, "buffer"))
        if self._options.inputs:
            rows += [observe(x, label, "input") for label, x in call_leaves(args, kwargs)]
        if self._options.outputs:
            rows += [observe(x, label, "output") for label, x in leaves(output, "output")]
        return rows

    def _fail(self, call: Call) -> None:
        self._faulty = call.batch
        frames = self.frames
        given = [(label, x) for label, ref in self._given.get(call.batch, ()) if (x := ref()) is not None]
        batch_inputs = [to_record(observe(x, label, "input")) for label, x in given]
        current = [frame for frame in frames if frame.batch == call.batch]
        rank = _rank()
        finding = find(current, batch_inputs=batch_inputs, caller=call.caller, rank=rank)
        report = Report(frames, finding, call.batch, rank)
        opens_run = not self._run_is_open
        if opens_run:
            self._failure = report
            self._run_is_open = True
        if callable(self._options.on_nonfinite):
            self._options.on_nonfinite(report)
        elif self._options.on_nonfinite == "raise":
            raise NonFiniteError(report)
        elif self._options.on_nonfinite == "warn" and opens_run and finding is not None:
            warnings.warn(
                f"{text.summary(finding)}; Watch.report() has the frames that led to it",
                RuntimeWarning,
                stacklevel=2,
            )


def own_tensors(named: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a module's `_parameters` or `_buffers`, each once, without the empty places."""
    found = [(name, x) for name, x in named.items() if x is not None]
    if len(found) > 1:
        # A tensor under two names of one module counts once, under the first.
        first = {id(x): name for name, x in reversed(found)}
        found = [(name, x) for name, x in found if first[id(x)] == name]
    return found


def _check_model(model: object) -> None:
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"watch() needs a module, got the class {model.__name__}; pass {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch() needs a torch.nn.Module, got {type(model).__name__}; pass the model itself")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"watch() cannot hook the modules inside a {type(model).__name__};"
            " pass the model as it was before torch.jit"
        )


def _whole(option: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{option} should be a whole number of at least {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{option} should be at least {least}, got {value}")
    return value


def _batches(option: str, value: Iterable[int]) -> frozenset[int]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{option} should be a collection of batch numbers such as (0, 3), got {value!r}")
    return frozenset(_whole(f"each of {option}", batch, 0) for batch in value)


def _patterns(option: str, value: str | Iterable[str]) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else None
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{option} should be a pattern or several, such as 'encoder.block.*', got {value!r}")
    return patterns


def _select(names: Sequence[str], include: tuple[str, ...], exclude: tuple[str, ...]) -> set[str]:
    for pattern in include:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = difflib.get_close_matches(pattern, names, n=3)
            hint = f"close names: {', '.join(close)}" if close else "see model.named_modules() for the names"
            raise ValueError(f"include pattern {pattern!r} matches no module; {hint}")
    selected = {
        name
        for name in names
        if (not include or any(fnmatchcase(name, pattern) for pattern in include))
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    }
    if not selected:
        raise ValueError(
            f"include={include!r} and exclude={exclude!r} leave no module to watch; loosen one of them"
        )
    return selected


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _print_lines(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
