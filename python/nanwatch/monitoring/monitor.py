"""Monitoring over many batches: forecasts from the largest magnitudes, and the user's log from frames."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import inf, log2
from time import monotonic
from typing import Any

from torch import nn

from ..recording.events import Event, PeakName, Recorder
from ..records.headroom import headroom_bits
from ..records.record import Frame, Record
from ..report.finding import Finding
from ..report.text import summary
from ..util.modules import each_module
from ..util.visible import spell, visible, warn_user
from .backends import (
    FINDING,
    FORECAST,
    HEADROOM,
    IS_FINITE,
    LEAST,
    PLACE,
    RANGES,
    TOLD,
    Backend,
    Histogram,
    LogEntry,
    backend_for,
)
from .forecast import Forecast, Forecaster
from .peaks import PeakHistory
from .suspicion import Suspicion


class Monitor:
    """Subscriber that takes frames and magnitudes of some batches for the log and the forecaster.

    `every`, `log_to` and `log_every` are as `watch` takes them. `note` gets a frame for each forecast. Raises as
    `backend_for` does.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        *,
        every: int,
        forecasts: bool,
        log_to: Any,
        log_every: int,
        note: Callable[[Frame], None] | None = None,
    ) -> None:
        self._note = note
        # Gets the peaks of each batch.
        self.spikes: Callable[[int, list[PeakName], bytes], None] | None = None
        self._names: list[PeakName] = []  # that the forecaster has not met
        self._recorder = recorder
        self._every = every
        self._forecaster = Forecaster(_num_tensors(model)) if forecasts else None
        history = PeakHistory() if self._forecaster is None else self._forecaster.history
        self.suspicion = Suspicion(model, history)
        self._looking = threading.Lock()
        self._log: Log | None = None
        if log_to is not None:
            self._log = Log(backend_for(log_to), log_every)
        self._frames = recorder.subscribe(Event.FRAME)
        self._frames.active = self._log is not None
        recorder.gathers_peaks = forecasts

    @property
    def awaits_batches(self) -> bool:
        """Return whether the monitor needs the ends of batches."""
        return self._forecaster is not None or self._log is not None or self.spikes is not None

    def add(self, frame: Frame) -> None:
        """Take a frame from the recorder."""
        if self._log is not None and self._frames.active and self._log.is_due(frame.batch):
            self._log.add(frame)

    def end(self, batch: int) -> None:
        """Handle the end of a finite batch."""
        follows = self._forecaster is not None or self.spikes is not None
        forecasts = self._forecasts(batch) if follows else []
        if self._log is not None:
            self._log.end(batch, forecasts)
            self._frames.active = self._log.is_due(batch + self._every)
        for forecast in forecasts:
            if self._note is not None:
                self._note(forecast.rows(batch))
            grew = next((one.growth for one in self.suspicion.suspects() if one.growth), "")
            warn_user(f"{forecast}; grew since the watch began: {grew}" if grew else str(forecast))

    def on_nonfinite(self, finding: Finding | None) -> None:
        """Log a non-finite batch, or a step that was about to take non-finite gradients."""
        if self._log is not None and finding is not None:
            self._log.on_nonfinite(finding)

    def close(self) -> None:
        """Stop logging."""
        if self._log is not None:
            self._log.close()

    def follow(self, spikes: Callable[[int, list[PeakName], bytes], None]) -> None:
        """Hand the peaks of each batch to `spikes`."""
        self.spikes = spikes
        self._recorder.gathers_peaks = True

    def _forecasts(self, batch: int) -> list[Forecast]:
        # A batch of another thread that ends meanwhile is left out. Waiting could lock up: a signal's handler or the
        # garbage collector may end a batch in here.
        if not self._looking.acquire(blocking=False):
            return []
        try:
            found = []
            forecaster = self._forecaster
            if self._recorder.gathers_peaks:
                gathered, names, values = self._recorder.take_peaks()
                self._names += names
                if self.spikes is not None:
                    self.spikes(gathered, names, values)
                if forecaster is not None and (self.spikes is None or forecaster.is_due(batch)):
                    names, self._names = self._names, []
                    forecaster.meet(names)
                    if gathered == batch:
                        found = forecaster.end(batch, values)
            self._recorder.gathers_peaks = self.spikes is not None or (
                forecaster is not None and forecaster.is_due(batch + self._every)
            )
            return found
        finally:
            self._looking.release()


def _num_tensors(model: nn.Module) -> int:
    """Return the number of weights, buffers and modules, each module counted for an output."""
    return sum(1 + len(module._parameters) + len(module._buffers) for _, module in each_module(model))


# The log: entries of the batches, handed to a backend. It writes seldom, and an error of the backend ends the log and
# not the run.


class BatchLog:
    """The frames of one batch, and the log entry made of them.

    The largest record counts for each tensor by its module, label and dtype. Inputs are left out: each is another
    module's output.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._largest: dict[tuple[str, str, str], tuple[float, Record]] = {}

    def add(self, frame: Frame) -> None:
        """Take a frame of this batch."""
        for row in frame.records:
            abs_max = row.abs_max
            # Finite complex numbers may have a modulus that is too large for a float.
            if abs_max and row.isfinite and row.role != "input" and abs_max != inf:
                key = (frame.name, row.label, row.dtype)
                largest = self._largest.get(key)
                if largest is None or abs_max > largest[0]:
                    self._largest[key] = (abs_max, row)

    @cached_property
    def headroom(self) -> dict[str, tuple[float, str, str]]:
        """Return the least headroom of each module in bits, with label and dtype, the worst first.

        To be asked for when all frames are taken.
        """
        least: dict[str, tuple[float, str, str]] = {}
        for (module, label, dtype), (_, row) in self._largest.items():
            bits = headroom_bits(row)
            if bits is not None and bits < least.get(module, (inf,))[0]:
                least[module] = (bits, label, dtype)
        return dict(sorted(least.items(), key=lambda item: item[1][0]))

    def ranges(self) -> dict[str, Histogram]:
        """Return, by role, how many tensors have their largest magnitude in each power of two."""
        found: dict[str, list[float]] = {}
        for abs_max, row in self._largest.values():
            found.setdefault(row.role, []).append(log2(abs_max))
        return {role: Histogram.of(values) for role, values in found.items()}

    def entry(self, shown: Iterable[str], forecasts: Sequence[Forecast] = ()) -> LogEntry:
        """Return the entry, with a number for each of the modules in `shown` that has one."""
        headroom = self.headroom
        scalars = {IS_FINITE: 1.0}
        texts = {}
        if headroom:
            module, (bits, label, dtype) = next(iter(headroom.items()))
            scalars[LEAST] = bits
            texts[PLACE] = visible(f"{spell_module(module)} {label}, {dtype}")
        scalars |= {
            f"{HEADROOM}/{spell_module(name)}": headroom[name][0] for name in shown if name in headroom
        }
        wanted = set(shown)
        for (name, _, _), (_, row) in reversed(
            self._largest.items()
        ):  # the first output comes last and stays
            if row.role == "output" and row.statistics is not None and name in wanted:
                found = row.statistics._asdict()
                scalars |= {f"nanwatch_{what}/{spell_module(name)}": value for what, value in found.items()}
        scalars |= {f"{FORECAST}/{spell_module(one.module)}": float(one.batch) for one in forecasts}
        if forecasts:
            texts[TOLD] = "\n\n".join(map(str, forecasts))
        histograms = {f"{RANGES}/{role}": made for role, made in self.ranges().items()}
        return LogEntry(self.batch, scalars, histograms, texts)


def nonfinite_entry(finding: Finding) -> LogEntry:
    """Return the entry of a non-finite batch."""
    return LogEntry(finding.batch, {IS_FINITE: 0.0}, texts={FINDING: summary(finding)})


def spell_module(name: str) -> str:
    """Return the name of a module within a tag."""
    return visible(name) or "(root)"


# A tracker takes 30 to 60 µs a number. Where the entries of a model would take more than a fiftieth of the run's time,
# there are fewer of them.
_SHARE = 50
# Curves by module. Of a larger model those have one that were among the worst when there still was room.
_MOST_MODULES = 256


class Log:
    """Logs batches to a backend: every n-th, or fewer where that takes too long, and each non-finite one.

    An exception of the backend becomes one warning and the end of the log. `every` is in batches.
    """

    def __init__(self, backend: Backend, every: int) -> None:
        self._backend: Backend | None = backend
        self._every = every
        self._next = 0
        self._not_before = 0.0
        # Settled between batches: one whose first frames were not taken is not logged by its last.
        self._has_time = True
        # The first entry opens a file, or imports a package: it says nothing of the others.
        self._is_warm = False
        self._batch = BatchLog(-1)
        self._modules: dict[str, None] = {}
        self._told_of: int | None = None  # the latest batch that was logged as non-finite
        # A forked child has the tracker but not its thread: what is put in its queue would stay there, and block.
        self._process = os.getpid()

    def is_due(self, batch: int) -> bool:
        """Return whether the frames of this batch are wanted."""
        return self._backend is not None and self._has_time and batch >= self._next

    def add(self, frame: Frame) -> None:
        """Take a frame of the batch that is under way; those of one that went wrong are dropped with the next."""
        # Each thread adds to what is of its own batch, and no other is read at that batch's end.
        own = self._batch
        if own.batch != frame.batch:
            own = self._batch = BatchLog(frame.batch)
        own.add(frame)

    def end(self, batch: int, forecasts: Sequence[Forecast]) -> None:
        """Log a finite batch if its frames were taken, and the forecasts in any case."""
        taken, self._batch = self._batch, BatchLog(-1)
        if taken.batch == batch:
            self._next = batch + self._every
            self._write(lambda: self._entry(taken, forecasts))
        elif forecasts:
            self._write(lambda: BatchLog(batch).entry((), forecasts))
        self._has_time = monotonic() >= self._not_before

    def on_nonfinite(self, finding: Finding) -> None:
        """Log a non-finite batch. Consecutive ones are throttled to `log_every`, like any other entry."""
        last = self._told_of
        if last is not None and last <= finding.batch < last + self._every:
            return
        self._told_of = finding.batch
        # The next exception may end the process.
        self._write(lambda: nonfinite_entry(finding), flushes=True)

    def close(self) -> None:
        """Stop logging. The user's own tracker stays open. A second time does nothing."""
        backend, self._backend = self._backend, None
        if backend is not None and self._process == os.getpid():
            with self._safely():
                backend.close()

    def _entry(self, taken: BatchLog, forecasts: Sequence[Forecast]) -> LogEntry:
        for name in taken.headroom:
            if len(self._modules) >= _MOST_MODULES:
                break
            self._modules[name] = None
        return taken.entry(self._modules, forecasts)

    def _write(self, make: Callable[[], LogEntry], *, flushes: bool = False) -> None:
        backend = self._backend
        if backend is None or self._process != os.getpid():
            return
        begun = monotonic()
        with self._safely():
            backend.write(make())
            if flushes:
                backend.flush()
        ended = monotonic()
        if self._is_warm:
            self._not_before = ended + _SHARE * (ended - begun)
        self._is_warm = True

    @contextmanager
    def _safely(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._backend = None
            warn_user(
                f"nanwatch logs no more to log_to=, which raised {spell(error)}; the run goes on and is watched"
            )
