"""The names to import: `watch`, Watch, `replay`, and for the callbacks of trainers DeferredWatch."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterable, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..capsule.capsule import Capsule
from ..capsule.replay import Model, Replayed, call_again
from ..instrumentation.calls import check_model
from ..instrumentation.wrapped_names import named_modules, original_module, parameter_names
from ..report.report import Report
from ..sinks.sink import Sink
from ..util.visible import visible
from .options import SWITCH, Audit, OnNonfinite, Options, Trace, make_options
from .reports import Describe
from .watch import Watch

__all__ = ["DeferredWatch", "Watch", "replay", "watch"]


def watch(
    model: nn.Module,
    *,
    read: str | Iterable[str] = "weights buffers inputs outputs",
    gradients: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    modules: str | Iterable[str] = (),
    ignore_modules: str | Iterable[str] = (),
    every: int = 1,
    max_frames: int = 21,
    on_nonfinite: OnNonfinite = "raise",
    allow: str | Iterable[str] = (),
    rerun: bool | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    trace: str | os.PathLike[str] | Trace | None = None,
    sinks: Any = (),
    black_box: bool | None = None,
    forecast: bool = True,
    spikes: bool = False,
    audit: int | Audit | None = None,
    replicas: int = False,
    attention: int = False,
    guard_checkpoints: bool = False,
    **unknown: Any,
) -> Watch:
    """Start to watch `model` and return the Watch, which is also a context manager.

    NANWATCH_OPTIONS goes before these arguments (docs/options.md). NANWATCH=0 makes a Watch that watches nothing.

    Args:
        model: any nn.Module, also a compiled one. Modules that it gets later are watched too.
        read: which tensors to read in the forward. Integer buffers are skipped.
        gradients: in every backward, read the gradients of the tensors that are read in the forward. A step that is
            about to take a non-finite one is a failure, before any weight changes (docs/gradients.md).
        optimizer: read the state of this optimizer after each of its steps: moments, weights of its own.
        modules, ignore_modules: glob patterns on the names of modules, such as "encoder.block.*"; `*` crosses dots.
            Names may have or lack what DistributedDataParallel and other wrappers put before them.
        every: read only every n-th batch.
        max_frames: keep this many of the latest frames, calls of modules.
        on_nonfinite: "raise" a NonFiniteError; "warn" when non-finite values begin, and of their sum at `stop()`;
            only "record"; or a callable that gets the Report of each non-finite batch (docs/watching.md).
        allow: values that are meant, with patterns on the names of the modules that may hold them: "inf:mask*",
            "nan:embed". The model itself is "nan:(root)". Masks are recognised without it (docs/watching.md).
        rerun: after a failure run the batch once more to find operation, line and cures. None does so if the failure
            ends the batch or a function gets it, True also if the run goes on (docs/rerun.md).
        output_dir: a folder into which each failure's report (text, JSON, HTML) and capsule are written.
        trace: a file (`run.parquet`) or a folder to write the range of every tensor into, or a `nanwatch.Trace` with
            what else to keep. Needs `pyarrow` (docs/traces.md).
        sinks: what gets headroom, failures, forecasts and spikes: a name such as "tensorboard:runs/a", an object of a
            tracker, a function, a `nanwatch.Sink`, or several of these (docs/trackers.md).
        black_box: keep the latest calls in a file of 4 MiB that outlives a killed process, in `output_dir`, else in
            `~/.local/state/nanwatch` (docs/blackbox.md). None is True with `output_dir`. Needs the compiled part.
        forecast: warn of the module that will overflow first, at most three times in 10,000 batches
            (docs/forecasts.md).
        spikes: when the loss or the gradients jump, report the first module that left its own history. Reads gradients
            as `gradients` does (docs/spikes.md).
        audit: audit the optimizer's steps 1, 2, 3 and every n-th: which weights get no gradient, do not move, or move
            though a `nanwatch.Audit` names them as frozen. True is every 100th (docs/updates.md).
        replicas: every n steps compare, to the bit, the weights that the ranks of a job should hold alike. True is
            every 100 steps (docs/how-to/replicas.md).
        attention: in every n-th batch read the largest attention logit of each head. True is every 100th
            (docs/attention.md).
        guard_checkpoints: save a checkpoint with a non-finite weight or optimizer state beside the good one, and act on
            the failure (docs/how-to/good-checkpoint.md).

    Raises TypeError or ValueError, naming the given and the accepted values, for a `model` whose calls cannot be seen,
    an option with a wrong value, an unknown option, a pattern that matches nothing, and a place where nothing can be
    written; ImportError, naming the package, where `trace` or `sinks` needs one that is not installed.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.LayerNorm(2, eps=0.0))
        >>> watch = nanwatch.watch(model)
        >>> try:
        ...     model(torch.zeros(1, 2))
        ... except nanwatch.NonFiniteError as error:
        ...     print(str(error).splitlines()[0])
        nan first seen in `output` of 1 (LayerNorm) in batch 0
        >>> watch.stop()
    """
    given = {**locals(), **unknown}
    del given["model"], given["unknown"]
    watched = start_watch(model, make_options(given))
    earlier = _started.setdefault(model, weakref.WeakSet())
    for same in [watch for watch in earlier if watch._options == watched._options]:
        earlier.remove(same)
        same.stop()  # as in a notebook's cell that runs again
    earlier.add(watched)
    return watched


# Those that `watch` has started, by model.
_started: MutableMapping[nn.Module, weakref.WeakSet[Watch]] = WeakIdKeyDictionary()


def start_watch(model: nn.Module, options: Options, *, must_match: bool = True) -> Watch:
    """Start to watch `model`. A host that watches several models with the same patterns passes `must_match=False`."""
    check_model(model)
    model = original_module(model)
    names = [named.name for named in named_modules(model)]
    return Watch(model, options.for_model(names, parameter_names(model).values(), must_match=must_match))


class DeferredWatch:
    """Watch of a trainer's callback: its options are checked now, and its model comes with `start`.

    `more_sinks` are the callback's own. Raises as `watch` does, except for patterns that match no module, which only
    `start` can know.
    """

    def __init__(self, options: dict[str, Any], *more_sinks: Sink) -> None:
        self.options = make_options(options)
        self.options = replace(self.options, sinks=(*self.options.sinks, *more_sinks))
        self.watch: Watch | None = None

    def start(self, model: nn.Module, scaler: Any = None, describe: Describe | None = None) -> Watch:
        """Stop the Watch of the model before, and watch `model`. Raises as `watch` does.

        `scaler` is the trainer's, or None. The remarks of `describe` go to each finding, such as its request.
        """
        self.stop()
        options = self.options
        if options.gradients and callable(getattr(scaler, "get_scale", None)):
            options = replace(options, scaler=scaler)
        self.watch = start_watch(model, options)
        self.watch._reports.describe = describe
        return self.watch

    def stop(self) -> None:
        """Leave the model as it was found. The Watch and its frames stay."""
        if self.watch is not None:
            self.watch.stop()


def replay(
    capsule: Capsule | str | os.PathLike[str],
    model: Model,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Report:
    """Make a capsule's call again, watched, without gradients, and return its report.

    After a failure the call runs a few times more, as a batch does under `watch`, for the operation and for cures.

    The call has the capsule's weights, inputs, random states, autocast and training flags. `model`, the caller's random
    states and the capsule stay as they are. `report.finding` is None when all was finite this time.

    Args:
        capsule: a Capsule, or its folder.
        model: the whole model, the module of the capsule, or a callable that makes one of the two.
        dtype: cast weights and inputs of floating point to it, and leave autocast off.
        device: where to run; None for the device of the recorded call, or the CPU where that is missing.

    `report.finding.remarks` lists differences from the recorded call. When all was finite, each is a RuntimeWarning.

    Raises CapsuleError for a folder that is no capsule, ValueError where model and capsule do not fit or an input was
    left out, and the errors of the call itself.

    Examples:
        >>> import nanwatch, torch
        >>> layer = torch.nn.LayerNorm(2, eps=0.0)
        >>> folder = nanwatch.write_capsule("call", layer, "norm", [torch.zeros(1, 2)])
        >>> report = nanwatch.replay(folder, layer)
        >>> report.finding.value, report.finding.label
        ('nan', 'output')
    """
    done = rerun(capsule if isinstance(capsule, Capsule) else Capsule.open(capsule), model, dtype, device)
    if done.report.finding is None:
        for remark in done.remarks:
            warnings.warn(visible(f"replay: {remark}"), RuntimeWarning, stacklevel=2)
    return done.report


def rerun(
    capsule: Capsule, model: Model, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Replayed:
    """Do the same as `replay`, and return the remarks beside the report."""
    if os.environ.get(SWITCH) == "0":
        raise ValueError(f"{SWITCH}=0 switches every watch off, and a replay is nothing without; unset it")
    # The re-run comes when the call is over.
    options = Options(on_nonfinite=lambda _: None, act_at="batch", rerun=True)
    return call_again(capsule, model, lambda module: Watch(module, options), dtype, device)
