"""`watch`, and a watch whose model comes later."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..instrumentation.wrapped_names import named_modules, original_module
from ..recording.events import Check
from ..trace.trace import arrow
from ..util.modules import each_module
from .checks import check_model, check_place
from .options import MAX_FRAMES, OnNonfinite, Options, check_options
from .watch import Watch

__all__ = ["DeferredWatch", "Watch", "watch"]

# Frames that a batch may have for every module: two calls, and both once more when they are recomputed.
_CALLS = 4
_CONFIRMED_LATER = ("include", "exclude", "allow_inf", "trace")


def watch(
    model: nn.Module,
    *,
    max_frames: int = 21,
    on_nonfinite: OnNonfinite = "raise",
    check: Check = "auto",
    weights: bool = True,
    buffers: bool = True,
    inputs: bool = True,
    outputs: bool = True,
    gradients: bool = False,
    counts: bool = False,
    max_skipped_steps: int = 20,
    scaler: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    allow_inf: str | Iterable[str] = (),
    every: int = 1,
    reread_weights: int = 64,
    trace_batches: Iterable[int] = (),
    trace: str | os.PathLike[str] | None = None,
    log_to: Any = None,
    log_every: int = 50,
    abort_after_batch: int | None = None,
    forecast: bool = True,
    microscope: bool | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    peer_timeout: float = 30.0,
    enabled: bool = True,
    _measure_time: bool = False,
    _verify_hits: bool = False,
    _room: int = 0,
) -> Watch:
    """Start to watch `model` and return the Watch, which is also a context manager.

    Args:
        model: any nn.Module, also one that torch.compile made; modules registered in it later are watched too.
        max_frames: how many of the latest frames to keep.
        on_nonfinite: "raise" a NonFiniteError, "warn" when values begin not to be finite, when that changes or ends,
            and in sum at `stop()` (docs/watching.md), only "record", or a callable that gets the Report of each faulty
            batch. A callable lives until the model is freed or `stop()` is called: one that refers to the model keeps
            it alive.
        check: when to act on a non-finite value: at the "module" that holds it, at the end of the "batch", or, for
            "async", when a device has delivered. On a GPU that is at most one batch later. Only before an optimizer's
            step does "async" wait, for what is still to come of the forwards since the last one, so that their failure
            is raised before a parameter changes (docs/cuda.md). The report is the same. "auto" is "module" for tensors
            of the CPU, where looking needs no wait, and "batch" for those of a GPU. On the CPU "async" is "batch".
        weights, buffers, inputs, outputs: which tensors to look at; of the buffers, those of floating point.
        gradients: look in every backward at the gradients of what is looked at in the forward. A failure there is
            acted on when an optimizer's step is about to take it, before any weight changes; see docs/gradients.md.
            On a GPU that step waits for them, once, unless a GradScaler has.
            Without it no gradient is read, also not those that a step is about to take.
        counts: count the zeros, subnormals, nans and infinities of every tensor, for its record's `health` and the
            columns of a trace, and not only of those that are not finite; for a trace its elements by power of two,
            too (docs/formats.md). Each tensor is then read three times more, and on a GPU waited for: for a few
            batches, or with `every`.
        max_skipped_steps: how many steps in a row may be skipped for their gradients, as a GradScaler does; one more is
            a failure. A scale of 65536 has come down to 1 after 16. Needs `gradients`.
        scaler: the GradScaler, whose scale is told with each skipped step. None looks for the one that is in use. Needs
            `gradients`.
        optimizer: an optimizer whose state is looked at after each of its steps: moments, weights of its own.
        include, exclude: glob patterns on the names of modules, such as "encoder.block.*"; `*` crosses dots. Names are
            those in your own model: what DistributedDataParallel and other wrappers put before them may be left out.
        allow_inf: glob patterns on the names of modules whose infinities are meant; a nan in them still counts.
            Additive attention masks are recognised without it.
        every: look at every so many batches only.
        reread_weights: read a weight again after so many batches though nothing says that it changed; 1 is always.
            An optimizer's step, `load_state_dict` and writes that PyTorch sees are noticed at once.
        trace_batches: numbers of batches, from 0, whose frames are printed as they come.
        trace: a file (`run.parquet`) or a folder to write every frame into, a row a record, while the run lasts; with
            `trace_batches` only the frames of these batches, which are then not printed. A path that is taken gets a
            number, and with several processes the rank: `Watch.trace_path` has it. Needs `pyarrow` (docs/traces.md).
        log_to: where to log headroom by module, ranges, forecasts and whether all was finite: a SummaryWriter of
            TensorBoard, a run of wandb, the path of a folder for TensorBoard, or a callable that takes a dict of them
            and the number of the batch (docs/trackers.md). What it raises is one warning, and the end of the log.
        log_every: log one in so many batches, fewer where that would take more than 2 % of the time; faults at once.
            Needs `log_to`.
        abort_after_batch: raise BatchLimitError when the batch of this number is done.
        forecast: warn of the module that will overflow first, when its headroom shrinks so steadily that the batch can
            be foretold; at most three lines in 10,000 batches. Looks at each of the first batches, then at fewer, down
            to one in 16 (docs/watching.md).
        microscope: after a failure run the batch once more, as it was, to find the operation and the line that made
            the first non-finite value and to try cures. Until then it costs a few microseconds a batch. None does so
            where the failure ends the batch ("raise"); True also where the run goes on, and where a second forward can
            be felt by a model with a state of its own.
        output_dir: a folder into which each failure's report (text, JSON, HTML) and capsule are written.
        peer_timeout: in a job of several ranks, how many seconds a rank that fails, or hears that another has, waits at
            most for all of them to agree on where it was first; then each raises an error that says so. Only with
            "raise". 0 does without: each rank speaks for itself, and the others may hang (docs/distributed.md).
        enabled: False makes a Watch that watches nothing. The environment goes first: NANWATCH=0 or NANWATCH=1.

    Raises TypeError or ValueError, naming what was given and what is accepted, when `model` is not a module whose
    calls can be seen, or an option means nothing or has no effect without another one, or nothing can be
    written at `output_dir` or `trace`; ImportError, naming the package, where `trace` or `log_to` needs one that is not
    installed.
    """
    check_model(model)
    model = original_module(model)
    given = {name: value for name, value in locals().items() if name in Options.__dataclass_fields__}
    options = check_options([one.name for one in named_modules(model)], given)
    return Watch(model, options, measure_time=_measure_time, verify_hits=_verify_hits, room=_room)


class DeferredWatch:
    """The options of `watch`, and the Watch once `start` was given the model.

    `roomy`: its recorder holds a whole batch, though `frames` and reports show no more than was asked for. Raises
    TypeError, ValueError or ImportError for options as `watch` does, but for patterns that match no module, which only
    `start` can know.
    """

    def __init__(self, options: dict[str, Any], *, roomy: bool = False) -> None:
        self.options = dict(options)
        self._roomy = roomy
        self.watch: Watch | None = None
        # The run may change its folder before the model comes.
        for option in ("trace", "output_dir", "log_to"):
            if isinstance(value := self.options.get(option), str | os.PathLike):
                self.options[option] = check_place(option, value)
        if self.options.get("trace") is not None:
            arrow("pyarrow.parquet", "trace=")
        general = {name: value for name, value in self.options.items() if name not in _CONFIRMED_LATER}
        watch(nn.Identity(), **general).stop()

    def start(self, model: nn.Module, scaler: Any = None) -> Watch:
        """Watch `model`, and what was watched before no longer. Raises as `watch` does.

        `scaler` is what its trainer has for one, if anything; that of the options goes first.
        """
        self.stop()
        options = dict(self.options)
        is_wanted = options.get("gradients") and options.get("scaler") is None
        if is_wanted and callable(getattr(scaler, "get_scale", None)):
            options["scaler"] = scaler
        room = min(_CALLS * sum(1 for _ in each_module(model)), MAX_FRAMES) if self._roomy else 0
        self.watch = watch(model, **options, _room=room)
        return self.watch

    def stop(self) -> None:
        """Leave the model as it was found; the Watch and its frames stay."""
        if self.watch is not None:
            self.watch.stop()
