"""Calls of a model without grad mode: in the wrong mode, before anything is ready for them, or with dropout at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch import Tensor, nn

from ...instrumentation.wrapped_names import named_modules
from ...recording.events import Event, Recorder
from ...records.record import Frame
from ...util.modules import each_parameter
from ...util.place import Place
from . import blame
from .modes import depends_on_mode, drops, unestimated
from .suspicions import Fault

# Calls of the model without grad mode, in training mode: in a row, or rarer than others. One may make the fake samples
# of a GAN, and that for each batch.
_LEAST = 2
# Evaluation batches whose random state is read, and those in which a module has to draw.
_BATCHES, _DRAWS = 4, 2


class Evaluations:
    """Counts calls with and without grad mode, and reads the random state in the first evaluation batches.

    The state is read after each call, so any change is of the module that has just ended.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.in_a_row = 0
        self._number = self.num_trained = 0
        self._is_first = True
        self.frames = recorder.subscribe(Event.FRAME)
        self.frames.active = False
        self._left = _BATCHES
        self._batch = -1
        self._state: Tensor | None = None
        self._draws: dict[str, set[int]] = {}

    def trained(self) -> None:
        """Take a call in grad mode."""
        self.in_a_row = 0
        self.num_trained += 1
        self._is_first = False

    def faults(
        self, model: nn.Module, batch: int, frame: FrameType, *, has_stepped: bool
    ) -> Iterator[tuple[Fault, Callable[[], Place | None]]]:
        """Take a call without grad mode from this frame, and yield its faults with what looks for their lines."""
        if not model.training:
            self.frames.active = has_stepped and self._left > 0
            if self.frames.active:
                self._left -= 1
                self._batch, self._state = batch, _random_state(model)
            for name, ratio in unestimated(model) if self._is_first else ():
                fault = Fault("eval-mode-wrong:norm", name, None, 1, {"ratio": ratio})
                yield fault, lambda: blame.where_called("eval")
            self._is_first = False
        elif has_stepped:
            self.in_a_row += 1
            self._number += 1
            is_rare = self._number == _LEAST and self.num_trained >= _LEAST * self._number
            if (is_rare or self.in_a_row == _LEAST) and depends_on_mode(model):
                yield Fault("eval-mode-wrong", "", None, 1, {}), lambda: blame.place_of(frame)

    def drawn(self, frame: Frame, model: nn.Module) -> Fault | None:
        """Take the end of a call, and return the fault of a module with dropout that has drawn often enough."""
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
        return Fault("eval-mode-wrong:dropout", frame.name, None, 1, {}) if len(draws) == _DRAWS else None


def _random_state(model: nn.Module) -> Tensor | None:
    device = next((x.device for x in each_parameter(model)), torch.device("cpu"))
    if device.type == "cpu":
        return torch.default_generator.get_state()
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.get_rng_state(device)
