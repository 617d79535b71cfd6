"""The latest gradients of one backward, for those that come once more, where there is no compiled part.

csrc/gradients/recent_gradients.h does the same, and says what for.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..report.record import Row

_KEPT = 16  # see csrc/gradients/recent_gradients.h


class GradientState(NamedTuple):
    """Which tensor, in which version, over which memory; None where nothing tells."""

    tensor: int
    version: int | None
    memory: tuple[Any, ...] | None

    @property
    def is_lasting(self) -> bool:
        """Whether an equal state means equal content while tensor and memory are still the same."""
        return self.version is not None and self.memory is not None


def state_of(x: Tensor) -> GradientState:
    """Subclasses and what is not strided change in ways of their own, and may hold tensors."""
    version = None if x.is_inference() else x._version
    is_plain = (
        type(x) is Tensor
        and x.layout is torch.strided
        and x.device.type in ("cpu", "cuda")
        and not (x.is_nested or x.is_quantized or x._is_zerotensor())
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )
    memory = None
    if is_plain:
        storage = x.untyped_storage()._cdata
        memory = (storage, x.storage_offset(), x.dtype, tuple(x.shape), x.stride())
    return GradientState(x._cdata, version, memory)


class RecentGradients:
    """Weak references say that neither the tensor nor its storage has a new owner of its address."""

    def __init__(self) -> None:
        self._kept: deque[tuple[GradientState, Row, object]] = deque(maxlen=_KEPT)

    def find(self, state: GradientState) -> Row | None:
        """The row that a gradient was kept with, as it is now."""
        if not state.is_lasting:
            return None
        return next((row for kept, row, _ in self._kept if kept == state), None)

    def keep(self, x: Tensor, state: GradientState, row: Row) -> None:
        """For a state that is lasting."""
        held = torch._C._WeakTensorRef(x), StorageWeakRef(x.untyped_storage())  # type: ignore[attr-defined]
        self._kept.append((state, row, held))

    def clear(self) -> None:
        """Let go of what was freed."""
        self._kept.clear()
