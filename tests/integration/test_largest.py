"""The largest magnitudes of a batch: those of its frames, by both recorders."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanwatch.numerics.formats import limits
from nanwatch.recording.events import PeakName
from nanwatch.records.record import Frame, Note
from nanwatch.session.api import watch
from nanwatch.session.watch import Watch

pytestmark = pytest.mark.usefixtures("each_recorder")


def watched(model: nn.Module, **options: Any) -> Watch:
    """A watch that gathers and whose own forecasts take nothing away."""
    w = watch(model, forecast=False, max_frames=10_000, on_nonfinite="record", rerun=False, **options)
    w._recorder.gathers_from = 0
    return w


class Taker:
    """Puts names and values together, from one taking to the next: those that the monitor hands on, or what is left."""

    def __init__(self, w: Watch) -> None:
        self.recorder = w._recorder
        self.names: list[PeakName] = []
        self.latest: tuple[int, bytes] | None = None
        w._monitor.follow(self.keep)

    def keep(self, batch: int, names: list[PeakName], values: bytes) -> None:
        self.names += names
        self.latest = batch, values

    def take(self) -> tuple[int, dict[PeakName, float]]:
        if self.latest is None:
            self.keep(*self.recorder.take_peaks())
        (batch, values), self.latest = self.latest, None
        largest = np.frombuffer(values)
        assert len(largest) == len(self.names) == len(set(self.names))
        return batch, {name: value for name, value in zip(self.names, largest, strict=True) if value > 0}


def of_frames(frames: tuple[Frame, ...], batch: int, inputs: bool = False) -> dict[PeakName, float]:
    """The same from the frames of the batch."""
    largest: dict[PeakName, float] = {}
    for frame in frames:
        for r in frame.records:
            # Counts tensors that have a format, were made or are held here, and are neither a failure nor a mask.
            if frame.batch != batch or frame.recomputed or limits(r.dtype) is None:
                continue
            if r.role == "input" and not inputs:
                continue
            if r.isfinite and r.abs_max and r.note != Note("mask"):
                name = (frame.name, r.label, r.dtype)
                largest[name] = max(largest.get(name, 0.0), r.abs_max)
    return largest


class Mixed(nn.Module):
    """A buffer that is a mask, another, and outputs of every kind; some of them only now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("scale", torch.tensor([2.0, 5.0]))
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        made = {
            "half": x.half(),
            "complex": torch.complex(x, x * self.calls),
            "integer": torch.tensor(7),
            "nothing": None,
            "zero": x * 0,
            "sparse": torch.eye(2).to_sparse(),
            "bad": x / 0,
        }
        if self.calls % 2:
            made = dict(reversed(made.items())) | {f"only{self.calls % 4}": x * self.calls}
        return made


def test_of_every_kind_of_value() -> None:
    """Integers, masks, faults and zeros are left out, whatever was seen before and in whatever order it comes."""
    shared = Mixed()
    model = nn.ModuleList([shared])
    model.forward = lambda x: [shared(x), shared(-3 * x)]  # type: ignore[method-assign]
    with watched(model) as w:
        taker = Taker(w)
        for batch in range(8):
            w._recorder.gathers_inputs = inputs = batch >= 6
            with torch.set_grad_enabled(batch % 2 == 0):
                model(torch.tensor([1.0, float(batch)]))
            assert taker.take() == (batch, of_frames(w.frames, batch, inputs))
    dtypes = {name[2] for name in taker.names}
    assert dtypes == {"float32", "float16", "complex64"}


def test_nothing_of_another_batch_is_left() -> None:
    """A batch that nobody asked about, one that raised, and what a checkpoint computes again in the backward."""
    linear = nn.Linear(2, 2)
    model = nn.Sequential(linear, nn.Tanh())
    with watched(model) as w:
        taker = Taker(w)
        model(torch.full((1, 2), 1e6))
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 3))
        loss = checkpoint(model, torch.ones(1, 2), use_reentrant=False).sum()
        assert taker.take() == (2, of_frames(w.frames, 2))
        with torch.no_grad():
            linear.weight.mul_(100)
        loss.backward()
        assert any(frame.recomputed for frame in w.frames)
        assert taker.take() == (-1, {})
        w._recorder.gathers_from = sys.maxsize
        model(torch.ones(1, 2))
        assert taker.take() == (-1, {})


def test_gradients_of_several_backwards() -> None:
    """The largest of all, by the name of the latest batch, though the gradients of an earlier one come last."""
    model = nn.Linear(2, 2, bias=False)
    with watched(model, gradients=True) as w:
        w._recorder.gathers_gradient_peaks = True
        losses = [model(torch.full((1, 2), size)).sum() for size in (1.0, 4.0)]
        for loss in reversed(losses):
            loss.backward()
        batch, names, values = w._recorder.take_gradient_peaks()
    largest = dict(zip([label for _, label, _ in names], np.frombuffer(values), strict=True))
    assert (batch, largest) == (1, {"output.grad": 1.0, "weight.grad": 4.0})
