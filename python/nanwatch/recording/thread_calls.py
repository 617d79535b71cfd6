"""The calls under way in a thread, for the recorder without the compiled part."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..records.record import Role
from .batch_start import KeptStart
from .masks import Excuses


@dataclass(frozen=True, slots=True)
class Node:
    """A watched module: its name, its class, and whether its calls are recorded."""

    name: str
    class_name: str
    observed: bool
    allow_inf: bool | Excuses


class ThreadCalls(threading.local):
    """The calls under way in one thread, outermost first."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.batch = 0
        self.recomputed = False
        self.recording = False  # a callback may call other modules: they are not recorded
        self.given: tuple[tuple[Any, ...], Any] = ((), None)
        self.start: KeptStart | None = None  # of the batch under way
        self.is_inside = False  # of a batch that a module's call began
        self.added: list[tuple[int, str, Tensor]] = []  # outputs to add to calls, which their depths name
        # The arguments of an outermost call in compiled code, by their places. An exception there leaves out the
        # operator at its end.
        self.compiled: dict[str, weakref.ref[Tensor]] | None = None

    @property
    def innermost(self) -> str | None:
        """Return the name of the module whose call is under way, or None."""
        return self.nodes[-1].name if self.nodes else None

    def take_added(self) -> list[tuple[Role, str, Tensor]]:
        """Return the outputs that were added to the call that has just ended."""
        taken: list[tuple[Role, str, Tensor]] = []
        while self.added and self.added[-1][0] > len(self.nodes):
            taken.insert(0, ("output", *self.added.pop()[1:]))
        return taken

    @contextmanager
    def is_recording(self) -> Iterator[None]:
        """Record no call of this thread meanwhile: what a callback calls is not the run's."""
        self.recording = True
        try:
            yield
        finally:
            self.recording = False
