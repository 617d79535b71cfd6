"""Calls of a model without grad mode, in the wrong mode or before anything is ready for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FrameType

from torch import nn

from ...util.place import Place
from . import blame
from .modes import depends_on_mode, unestimated
from .suspicions import Fault

# Calls of the model without grad mode, in training mode: in a row, or rarer than others. One may make the fake samples
# of a GAN, and that for each batch.
_LEAST = 2


class Evaluations:
    """Counts calls with and without grad mode."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._number = self.num_trained = 0
        self._is_first = True

    def trained(self) -> None:
        """Take a call in grad mode."""
        self.in_a_row = 0
        self.num_trained += 1
        self._is_first = False

    def faults(
        self, model: nn.Module, frame: FrameType, *, has_stepped: bool
    ) -> Iterator[tuple[Fault, Callable[[], Place | None]]]:
        """Take a call without grad mode from this frame, and yield its faults with what looks for their lines."""
        if not model.training:
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
