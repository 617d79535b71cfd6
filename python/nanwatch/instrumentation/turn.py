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

from ..util.modules import each_module
from .links import chain, own_call
from .stand_in import StandIn, before_calls

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
        return self.is_owned() or torch._C._current_graph_task_id() != -1

    def is_owned(self) -> bool:
        """Whether the calling thread made it."""
        return threading.get_ident() == self._owner

    def holds_up(self) -> bool:
        """Whether the calling thread has to wait."""
        return not self._free.is_set() and not self.is_ours()

    def wait(self) -> None:
        """Wait for the end, but no longer than PATIENCE, and not once more after that; at once for who may go on."""
        if not self.is_ours() and not self._free.wait(PATIENCE):
            self._free.set()

    def end(self) -> None:
        """Let the others go on."""
        self.is_over = True
        self._free.set()


class _Gate(StandIn):
    """The link before a module's call during a turn. The owner's calls pass the watches by; those of others wait."""

    def __init__(self, module: nn.Module, turn: Turn) -> None:
        super().__init__(module)
        self._turn = turn

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        if self._turn.is_ours():
            return own_call(module)(*args, **kwargs)
        self._turn.wait()
        if self._turn.is_over:  # from the start: the next turn may have begun
            return nn.Module.__call__(module, *args, **kwargs)
        return self.run_inner(module, args, kwargs)


@contextmanager
def unwatched(root: nn.Module) -> Iterator[None]:
    """Inside, no watch records anything of a module in the tree; other threads that call one wait for the end.

    The watches stay where they are. So one that is stopped or paused meanwhile stays so.
    """
    turn = Turn()
    watched = [module for _, module in each_module(root) if chain(module)]
    # The hooks of gradients on weights stand before no call.
    found = {id(link.recorder): link.recorder for module in watched for link in chain(module)}
    recorders = [recorder for recorder in found.values() if recorder is not None]
    for recorder in recorders:
        recorder.suspend(True)
    try:
        with before_calls(_Gate(module, turn) for module in watched):
            yield
    finally:
        for recorder in recorders:
            recorder.suspend(False)
        turn.end()
