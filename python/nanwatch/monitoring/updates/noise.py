"""Modules with dropout that draw random numbers in evaluation mode."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...instrumentation.wrapped_names import named_modules
from ...recording.events import Event, Recorder
from ...records.record import Frame
from ...util.modules import each_parameter
from .modes import drops

# Evaluation batches that are looked at, and those in which a module has to draw.
_BATCHES, _DRAWS = 4, 2


class Noise:
    """The random state at each call of the first evaluation batches. Any change is of the module that ends then."""

    def __init__(self, recorder: Recorder) -> None:
        self.frames = recorder.subscribe(Event.FRAME)
        self.frames.active = False
        self._left = _BATCHES
        self._batch = -1
        self._state: Tensor | None = None
        self._draws: dict[str, set[int]] = {}

    def start(self, model: nn.Module, batch: int) -> None:
        """Take the start of an evaluation batch."""
        self.frames.active = self._left > 0
        if self.frames.active:
            self._left -= 1
            self._batch, self._state = batch, _random_state(model)

    def on_frame(self, frame: Frame, model: nn.Module) -> str | None:
        """Take the end of a call, and return the module's name when it has drawn often enough."""
        if frame.batch != self._batch or self._state is None:
            return None
        before, self._state = self._state, _random_state(model)
        self.frames.active = bool(frame.name)
        if self._state is None or torch.equal(before, self._state):
            return None
        module = next((one.module for one in named_modules(model) if one.name == frame.name), None)
        if module is None or module.training or not drops(module):
            return None
        draws = self._draws.setdefault(frame.name, set())
        draws.add(frame.batch)
        return frame.name if len(draws) == _DRAWS else None


def _random_state(model: nn.Module) -> Tensor | None:
    device = next((x.device for x in each_parameter(model)), torch.device("cpu"))
    if device.type == "cpu":
        return torch.default_generator.get_state()
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.get_rng_state(device)
