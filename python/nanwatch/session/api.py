"""The names to import: `watch`, Watch, and for the callbacks of trainers DeferredWatch and the least headroom."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..instrumentation.calls import check_model
from ..instrumentation.wrapped_names import named_modules, original_module, parameter_names
from ..numerics import _extension
from ..recording.events import Check
from ..records.headroom import headroom_bits
from ..sinks.logs import is_log
from ..trace.trace import arrow
from ..util.modules import each_module
from ..util.visible import module_name
from .option_kinds import check_flag, check_place, check_sinks
from .option_sources import FIELDS, values_in_force, without_defaults
from .options import MAX_FRAMES, OnNonfinite, Options, check_options
from .reports import Describe
from .watch import Watch

__all__ = ["DeferredWatch", "Watch", "watch"]

# Frames that a batch may have for every module: two calls, and both once more when they are recomputed.
_CALLS = 4
# Options that `start` checks, because they need the model or open a file.
_CONFIRMED_LATER = ("include", "exclude", "allow_inf", "allow_nan", "frozen", "trace", "sinks")


def watch(
    model: nn.Module,
    *,
    # What is read
    weights: bool = True,
    buffers: bool = True,
    inputs: bool = True,
    outputs: bool = True,
    gradients: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    attention: int = False,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    # What is kept of it
    max_frames: int = 21,
    counts: bool = False,
    fingerprints: bool = False,
    statistics: int = False,
    sketches: int = False,
    # When
    every: int = 1,
    abort_after_batch: int | None = None,
    enabled: bool = True,
    # What is a failure, and what follows
    on_nonfinite: OnNonfinite = "raise",
    check: Check = "auto",
    allow_inf: str | Iterable[str] = (),
    allow_nan: str | Iterable[str] = (),
    rerun: bool | None = None,
    guard_checkpoints: bool = False,
    forecast: bool = True,
    updates: int = False,
    frozen: str | Iterable[str] = (),
    spikes: bool = False,
    max_skipped_steps: int = 20,
    scaler: Any = None,
    replicas: int = False,
    peer_timeout: float = 30.0,
    # Where it goes
    output_dir: str | os.PathLike[str] | None = None,
    black_box: bool = True,
    stall_timeout: float | None = None,
    trace: str | os.PathLike[str] | None = None,
    trace_batches: Iterable[int] = (),
    sinks: Any = (),
    log_every: int = 50,
    _measure_time: bool = False,
    _verify_hits: bool = False,
) -> Watch:
    """Start to watch `model` and return the Watch, which is also a context manager.

    Args:
        model: any nn.Module, also a compiled one. Modules that it gets later are watched too.
        weights, buffers, inputs, outputs: which tensors to read; of the buffers, those of floating point.
        gradients: in every backward, read the gradients of the tensors that are read in the forward. Act on a failure
            when an optimizer's step is about to take it, before any weight changes (docs/gradients.md). On a GPU that
            step waits for them once, unless a GradScaler has. Without it no gradient is read.
        optimizer: an optimizer whose state is read after each of its steps: moments, weights of its own.
        attention: read the attention logits of `scaled_dot_product_attention`, `flex_attention` and `softmax` in the
            watched model: in every batch a bound, and every n-th batch the largest logit of each head; True is every
            100th. They are outputs of the module that calls attention, and `Watch.attention` (docs/attention.md).
        include, exclude: glob patterns on the names of modules, such as "encoder.block.*"; `*` crosses dots. Names are
            those in your own model, without what DistributedDataParallel and other wrappers put before them.
        max_frames: keep this many of the latest frames.
        counts: count zeros, subnormals, nans and infinities of every tensor, for its record's `health` and the columns
            of a trace, and for a trace its elements by power of two (docs/formats.md). This reads each tensor three
            times more and waits for a GPU: use it for a few batches, or with `every`.
        fingerprints: keep the `nanwatch.fingerprint` of every tensor in its record and in a trace, so that two runs can
            be compared bit by bit (docs/traces.md). Every tensor on a GPU is then waited for.
        statistics: keep the `nanwatch.statistics` of every tensor in its record, in a trace and for sinks, in every
            n-th batch; True is every batch. Such a batch reads all tensors anew and waits for a GPU (docs/costs.md).
        sketches: in every n-th batch write a sketch of each output into the trace: 32 numbers for each row (token),
            from which `nanwatch.diff` estimates relative errors and cosines of two runs (docs/traces.md); True is every
            batch. Such a batch takes longer, and waits for a GPU at every output. Needs `trace`.
        every: read only every n-th batch.
        abort_after_batch: raise BatchLimitError at the end of the batch of this number.
        enabled: False makes a Watch that watches nothing. The environment goes first: NANWATCH=0 or NANWATCH=1.
        on_nonfinite: "raise" a NonFiniteError; "warn" when non-finite values begin, change or end, and in sum at
            `stop()` (docs/watching.md); only "record"; or a callable that gets the Report of each non-finite batch, in
            a job of several ranks with the place on which they agreed (docs/distributed.md). A callable lives until the
            model is freed or `stop()`. If it refers to the model, it keeps the model alive.
        check: when to act on a non-finite value: at the "module" that holds it, or at the end of the "batch". The
            report is the same. "auto" is "module" for tensors of the CPU, which are read without a wait, and "batch"
            for those of a GPU, which is waited for once (docs/cuda.md).
        allow_inf: glob patterns on the names of modules whose infinities are meant; a nan in them still counts.
            Masks are recognised without it (docs/watching.md).
        allow_nan: glob patterns on the names of modules whose nans are meant, such as missing values in the data. The
            model itself has the name "".
        rerun: after a failure run the batch once more to find the operation and the line that made the first
            non-finite value, and to try cures. Until then it costs 10 to 20 microseconds a batch. None does so if the
            failure ends the batch ("raise"). True does so also if the run goes on; a model with state may notice the
            second forward.
        guard_checkpoints: read what `torch.save`, safetensors, `save_pretrained`, `torch.distributed.checkpoint`, and
            Lightning's and transformers' Trainer are about to save. A non-finite weight of the model, or state of its
            optimizer, is then a failure, before the old file is touched: the checkpoint goes beside it, as in
            `model.nonfinite.safetensors` (docs/how-to/good-checkpoint.md).
        forecast: warn of the module that will overflow first, when its headroom shrinks so steadily that the batch can
            be predicted; at most three lines in 10,000 batches. Reads each of the first batches, then fewer, down to
            one in 16 (docs/forecasts.md).
        updates: audit the optimizer's steps 1, 2, 3 and every n-th: which weights get no gradient, do not move, or move
            though they are frozen (docs/updates.md). True is every 100th. `Watch.updates` has the findings, and a
            warning tells of the first.
        frozen: glob patterns on the names of modules or weights that are meant to stay as they are, such as
            "backbone.*": `updates` tells of a step that moves one. Needs `updates`.
        spikes: keep histories of all magnitudes, and when the loss or the gradients jump, report the first module that
            left its own history (docs/spikes.md). The loss is what `Watch.note_loss` gets, or an output called `loss`.
            Reads gradients as `gradients` does.
        max_skipped_steps: how many steps in a row a GradScaler may skip; one more is a failure. A scale of 65536 is
            down to 1 after 16. Needs `gradients`.
        scaler: the GradScaler, whose scale each skipped step reports. None looks for the one that is in use. Needs
            `gradients`.
        replicas: in a job of several ranks, compare every n steps of the optimizer the fingerprints of the weights,
            buffers and optimizer states that the ranks should hold alike, to the bit; True is every 100 steps. A
            warning and `Watch.replica_differences` name the tensor and the rank (docs/how-to/replicas.md). No
            collective is issued, and the run goes on.
        peer_timeout: in a job of several ranks, how many seconds a rank that fails, or learns that another has, waits
            at most for all to agree where it began. With "raise" each then raises an error that says so, with a
            callable the reports of the failing ranks say so. 0 turns this off: each rank speaks for itself, and with
            "raise" the others may hang (docs/distributed.md).
        output_dir: a folder into which each failure's report (text, JSON, HTML) and capsule are written.
        black_box: write the beginnings and ends of calls, the latest frames and the least headroom of each batch into a
            file of 8 MiB that can be read after the process was killed, and while it runs: in `output_dir`, else in
            `~/.local/state/nanwatch`, from where it goes when the process ends well (docs/blackbox.md). Needs the
            compiled part.
        stall_timeout: when no call of a watched module has begun or ended for this many seconds, write the stacks of
            all threads into the black box, and a line to the log. None is 10 times the slowest batch so far, at least
            300; 0 is never.
        trace: a file (`run.parquet`) or a folder to write every frame into, one row per record, while the run lasts;
            with `trace_batches` only the frames of these batches, which are then not printed. A path that is taken gets
            a number, and with several processes the rank: see `Watch.trace_path`. Needs `pyarrow` (docs/traces.md).
        trace_batches: numbers of batches, from 0, whose frames are printed as they come.
        sinks: whom to tell of headroom, ranges, failures, forecasts, spikes and skipped steps beside `on_nonfinite`
            (docs/trackers.md): a SummaryWriter of TensorBoard, a `pathlib.Path` of a folder for TensorBoard, a run of
            wandb, a function that takes a dict and the number of the batch, a `nanwatch.Sink`, a name such as
            "tensorboard:runs/a", or several of these. One that raises is dropped with a warning.
        log_every: sum up every n-th batch for sinks, fewer where that would take more than 2 % of the time. Failures
            are told at once. Needs `sinks`.

    Raises TypeError or ValueError, naming the given and the accepted values, for a `model` whose calls cannot be seen,
    an option with a wrong value or without effect, and an `output_dir` or `trace` where nothing can be written;
    ImportError, naming the package, where `trace` or `sinks` needs one that is not installed.

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
    given = {name: value for name, value in locals().items() if name in Options.__dataclass_fields__}
    check_model(model)
    values = values_in_force(without_defaults(given))
    started = start_watch(model, values, measure_time=_measure_time, verify_hits=_verify_hits)
    earlier = _started.setdefault(model, weakref.WeakSet())
    for same in [one for one in earlier if one._options == started._options]:
        earlier.remove(same)
        same.stop()  # as in a notebook's cell that runs again
    earlier.add(started)
    return started


# Those that `watch` has started, by model.
_started: MutableMapping[nn.Module, weakref.WeakSet[Watch]] = WeakIdKeyDictionary()


def start_watch(
    model: nn.Module, values: dict[str, Any], *, room: int = 0, must_match: bool = True, **settings: Any
) -> Watch:
    """Start to watch `model` with these values of the options, whatever is said outside of the code.

    `room` is as Watch takes it, `settings` are further ones of the recorder. A host that watches several models with
    the same patterns passes `must_match=False`.
    """
    check_model(model)
    model = original_module(model)
    names = [one.name for one in named_modules(model)]
    options = check_options(names, values, parameter_names(model).values(), must_match=must_match)
    if settings.get("measure_time") and _extension.C is None:
        raise _extension.missing("measuring the time spent in the recorder")
    return Watch(model, options, room=room, **settings)


class DeferredWatch:
    """Watch of a trainer's callback: its options are checked now, and its model comes with `start`.

    With `headroom` the recorder holds a whole batch for `look` and `take_least`, though `frames` and reports show no
    more than `max_frames`. Raises as `watch` does, except for patterns that match no module, which only `start` can
    know, and TypeError for a name that is no option.
    """

    def __init__(self, options: dict[str, Any], *, headroom: bool = False) -> None:
        self.options = values_in_force(options)
        self._has_headroom = check_flag("headroom", headroom)
        self._least: LeastHeadroom | None = None
        self.watch: Watch | None = None
        # The run may change its folder before the model comes.
        for option in ("trace", "output_dir"):
            if isinstance(value := self.options[option], str | os.PathLike):
                self.options[option] = check_place(option, value)
        self.options["sinks"] = sinks = check_sinks("sinks", self.options["sinks"])
        later = {*_CONFIRMED_LATER}
        if sinks:
            FIELDS["log_every"].metadata["check"]("log_every", self.options["log_every"])
            later.add("log_every")
        if self.options["trace"] is not None:
            arrow("pyarrow.parquet", "trace=")
            # It needs the trace, which is not opened now.
            FIELDS["sketches"].metadata["check"]("sketches", self.options["sketches"])
            later.add("sketches")
        general = {name: one.default if name in later else self.options[name] for name, one in FIELDS.items()}
        # A trial would close the others.
        general["sinks"] = tuple(filter(is_log, sinks))
        check_options([""], general)
        # The run may be in another process, so this one keeps no black box.
        start_watch(nn.Identity(), {**general, "black_box": False, "stall_timeout": None}).stop()

    def start(self, model: nn.Module, scaler: Any = None) -> Watch:
        """Stop the Watch of the model before, and watch `model`. Raises as `watch` does.

        `scaler` is the trainer's, or None. The scaler of the options goes first.
        """
        self.stop()
        options = dict(self.options)
        is_wanted = (options.get("gradients") or options.get("spikes")) and options.get("scaler") is None
        if is_wanted and callable(getattr(scaler, "get_scale", None)):
            options["scaler"] = scaler
        room = min(_CALLS * sum(1 for _ in each_module(model)), MAX_FRAMES) if self._has_headroom else 0
        self.watch = start_watch(model, options, room=room)
        self._least = LeastHeadroom(self.watch) if self._has_headroom else None
        return self.watch

    def stop(self) -> None:
        """Leave the model as it was found. The Watch and its frames stay."""
        if self.watch is not None:
            self.watch.stop()

    def describe(self, remarks: Describe) -> None:
        """Let the host add remarks to each finding of the Watch, such as the request that it belongs to."""
        if self.watch is not None:
            self.watch._reports.describe = remarks

    def look(self) -> None:
        """Read the frames since the last look, for `take_least`. To be called after each batch."""
        if self._least is not None:
            self._least.look()

    def take_least(self) -> Least | None:
        """Return the least headroom since the last time, None where no tensor had one."""
        return None if self._least is None else self._least.take()


@dataclass(frozen=True, slots=True)
class Least:
    """Tensor with the least headroom: its `bits` as in headroom_bits, -inf when it was not finite."""

    bits: float
    module: str
    label: str
    dtype: str

    @property
    def place(self) -> str:
        """Module, label and format in words: "encoder.wo output, float16"."""
        return f"{module_name(self.module)} {self.label}, {self.dtype}"


class LeastHeadroom:
    """Reader of the frames of a Watch, which should have room for those of a batch.

    Call `look` after every batch, and `take` to get the number. As in `by_module` an input counts only when it
    is a fault.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._frames_seen = watch._recorder.frames_kept
        self._least: Least | None = None
        # The largest magnitude so far by dtype. Only a larger one can have less headroom, which skips nearly all rows.
        self._largest: dict[str, float] = {}

    def look(self) -> None:
        """Read the frames that were recorded since the last look."""
        self._frames_seen, fresh = self._watch._recorder.frames_since(self._frames_seen)
        # Read rows: 2 µs per frame without a Frame.
        for frame in fresh:
            for row in frame.records:
                dtype, abs_max = row.dtype, row.abs_max
                nonfinite = row.is_fault
                if abs_max is None or not (
                    nonfinite or (row.role != "input" and abs_max > self._largest.get(dtype, 0.0))
                ):
                    continue
                bits = headroom_bits(row)
                if bits is None:
                    continue
                if not nonfinite:
                    self._largest[dtype] = abs_max
                if self._least is None or bits < self._least.bits:
                    self._least = Least(bits, frame.name, row.label, dtype)

    def take(self) -> Least | None:
        """Return the least since the last `take`, or None when there was none; then begin anew."""
        self.look()
        least, self._least = self._least, None
        self._largest.clear()
        return least
