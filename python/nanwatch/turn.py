"""The turn of a second run: the thread that makes it has the model to itself, and no watch sees it.

Another thread that calls the model meanwhile would be looked at as a part of the second run, draw from the random
states that it puts back, and lose what it writes into buffers. So it waits, and is then watched as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .calls import ATTRIBUTE, chain, put
from .stand_in import StandIn

# In seconds. A thread that the second run itself waits for must come through at last: better disturbed than stuck.
PATIENCE = 60.0


class Turn:
    """From its making until `end()`; it belongs to the thread that made it."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self.is_over = False
        self._free = threading.Event()

    def is_ours(self) -> bool:
        """Whether the calling thread may go on: the owner, and a thread of autograd, on which its backward may run."""
        return threading.get_ident() == self._owner or torch._C._current_graph_task_id() != -1

    def wait(self) -> None:
        """Wait for the end, but no longer than PATIENCE, and not once more after that; at once for who may go on."""
        if not self.is_ours() and not self._free.wait(PATIENCE):
            self._free.set()

    def end(self) -> None:
        """Let the others go on."""
        self.is_over = True
        self._free.set()


class _Gate(StandIn):
    """What stands in a module's place during a turn: through it its thread goes unwatched, and others later."""

    def __init__(self, module: nn.Module, turn: Turn, below: Any) -> None:
        super().__init__(module, below)
        self._turn = turn

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        if not self._turn.is_ours():
            self._turn.wait()
            if self._turn.is_over and module.__dict__.get(ATTRIBUTE) is not self:
                return nn.Module.__call__(module, *args, **kwargs)
        return self.run_below(module, args, kwargs)


@contextmanager
def unwatched(root: nn.Module) -> Iterator[None]:
    """Inside, no watch records anything of a module in the tree; other threads that call one wait for the end."""
    turn = Turn()
    taken: list[tuple[nn.Module, Any, _Gate]] = []
    recorders: dict[int, tuple[Any, bool]] = {}
    try:
        for module in root.modules():
            if watched := chain(module):
                for call in watched:
                    # The hooks of gradients on weights are in no call's place.
                    recorders.setdefault(id(call.recorder), (call.recorder, call.recorder.paused))
                    call.recorder.paused = True
                taken.append((module, watched[0], _Gate(module, turn, watched[-1].inner)))
                put(module, taken[-1][2])
        yield
    finally:
        for recorder, paused in recorders.values():
            recorder.paused = paused
        for module, before, gate in taken:
            if module.__dict__.get(ATTRIBUTE) is gate:
                put(module, before)
        turn.end()
