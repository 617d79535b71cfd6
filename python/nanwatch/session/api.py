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

    What NANWATCH_OPTIONS says goes before these arguments. NANWATCH=0 makes a Watch that watches nothing.

    Args:
        model: any nn.Module, also a compiled one. Modules that it gets later are watched too.
        read: which tensors to read in the forward. Integer buffers are skipped.
        gradients: in every backward, read the gradients of the tensors that are read in the forward. Act on a failure
            when an optimizer's step is about to take it, before any weight changes (docs/gradients.md). On a GPU that
            step waits for them once, unless a GradScaler has.
        optimizer: read the state of this optimizer after each of its steps: moments, weights of its own.
        modules, ignore_modules: glob patterns on the names of modules, such as "encoder.block.*"; `*` crosses dots.
            Names may have or lack what DistributedDataParallel and other wrappers put before them. A pattern that
            matches nothing is an error.
        every: read only every n-th batch.
        max_frames: keep this many of the latest frames, calls of modules.
        on_nonfinite: "raise" a NonFiniteError; "warn" when non-finite values begin, change or end, and in sum at
            `stop()` (docs/watching.md); only "record"; or a callable that gets the Report of each non-finite batch. A
            callable lives until the model is freed or `stop()`. If it refers to the model, it keeps the model alive.
        allow: values that are meant, with glob patterns on the names of the modules that may hold them: "inf:mask.*"
            for infinities, where a nan still counts, and "nan:embed" for nans, such as missing values in the data.
            The model itself has the name "": "nan:". Masks are recognised without it (docs/watching.md).
        rerun: after a failure run the batch once more to find the operation and the line that made the first
            non-finite value, and to try cures. None does so if the failure ends the batch ("raise") or a function gets
            it. True does so also if the run goes on; a model with state may notice the second forward.
        output_dir: a folder into which each failure's report (text, JSON, HTML) and capsule are written.
        trace: a file (`run.parquet`) or a folder to write the range of every tensor into while the run lasts, or a
            `nanwatch.Trace` with what else to keep. Needs `pyarrow` (docs/traces.md).
        sinks: what gets headroom, failures, forecasts, spikes and skipped steps beside `on_nonfinite`
            (docs/trackers.md): a SummaryWriter of TensorBoard, a `pathlib.Path` of a folder for TensorBoard, a run of
            wandb, a function that takes a dict and the number of the batch, a `nanwatch.Sink`, a name such as
            "tensorboard:runs/a", or several of these. One that raises is dropped with a warning.
        black_box: write the beginnings and ends of calls, the latest frames and the least headroom of each batch into a
            file of 8 MiB that can be read after the process was killed, and while it runs (docs/blackbox.md). It is in
            `output_dir`, else in `~/.local/state/nanwatch`. None is True with `output_dir`. Needs the compiled part.
        forecast: warn of the module that will overflow first, when its headroom shrinks so steadily that the batch can
            be predicted; at most three lines in 10,000 batches (docs/forecasts.md).
        spikes: keep histories of all magnitudes, and when the loss or the gradients jump, report the first module that
            left its own history (docs/spikes.md). The loss is what `Watch.note_loss` gets, or an output called `loss`.
            Reads gradients as `gradients` does.
        audit: audit the optimizer's steps 1, 2, 3 and every n-th: which weights get no gradient, do not move, or move
            though a `nanwatch.Audit` names them as frozen (docs/updates.md). True is every 100th. `Watch.updates` has
            the findings, and a warning tells of the first.
        replicas: in a job of several ranks, compare every n steps of the optimizer the fingerprints of the weights
            that the ranks should hold alike, to the bit; True is every 100 steps. A warning and
            `Watch.replica_differences` name the tensor and the rank (docs/how-to/replicas.md). No collective is
            issued, and the run goes on.
        attention: read the attention logits of `scaled_dot_product_attention`, `flex_attention` and `softmax` in the
            watched model: in every batch a bound, and every n-th batch the largest logit of each head; True is every
            100th. They are outputs of the module that calls attention, and `Watch.attention` (docs/attention.md).
        guard_checkpoints: read what `torch.save`, safetensors, `save_pretrained`, `torch.distributed.checkpoint`, and
            Lightning's and transformers' Trainer are about to save. A non-finite weight of the model, or state of its
            optimizer, is then a failure, before the old file is touched: the checkpoint goes beside it, as in
            `model.nonfinite.safetensors` (docs/how-to/good-checkpoint.md).

    Raises TypeError or ValueError, naming the given and the accepted values, for a `model` whose calls cannot be seen,
    an option with a wrong value, an earlier name of an option (docs/options.md has the present ones), and an
    `output_dir` or `trace` where nothing can be written; ImportError, naming the package, where `trace` or `sinks`
    needs one that is not installed.

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


def start_watch(model: nn.Module, options: Options, *, must_match: bool = True, **settings: Any) -> Watch:
    """Start to watch `model` with these options.

    `settings` are further ones of the recorder. A host that watches several models with the same patterns passes
    `must_match=False`.
    """
    check_model(model)
    model = original_module(model)
    names = [named.name for named in named_modules(model)]
    options = options.for_model(names, parameter_names(model).values(), must_match=must_match)
    return Watch(model, options, **settings)


class DeferredWatch:
    """Watch of a trainer's callback: its options are checked now, and its model comes with `start`.

    `more_sinks` are the callback's own. Raises as `watch` does, except for patterns that match no module, which only
    `start` can know.
    """

    def __init__(self, options: dict[str, Any], *more_sinks: Sink) -> None:
        self.options = make_options(options)
        self.options = replace(self.options, sinks=(*self.options.sinks, *more_sinks))
        self.watch: Watch | None = None

    def start(self, model: nn.Module, scaler: Any = None) -> Watch:
        """Stop the Watch of the model before, and watch `model`. Raises as `watch` does.

        `scaler` is the trainer's, or None.
        """
        self.stop()
        options = self.options
        if options.gradients and callable(getattr(scaler, "get_scale", None)):
            options = replace(options, scaler=scaler)
        self.watch = start_watch(model, options)
        return self.watch

    def stop(self) -> None:
        """Leave the model as it was found. The Watch and its frames stay."""
        if self.watch is not None:
            self.watch.stop()

    def describe(self, remarks: Describe) -> None:
        """Let the host add remarks to each finding of the Watch, such as the request that it belongs to."""
        if self.watch is not None:
            self.watch._reports.describe = remarks


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
    return call_again(capsule, model, _watch, dtype, device)


def _watch(module: nn.Module) -> Watch:
    # The re-run comes when the call is over.
    return Watch(module, Options(on_nonfinite=lambda _: None, act_at="batch", rerun=True))
