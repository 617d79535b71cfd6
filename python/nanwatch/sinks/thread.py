"""Thread of one sink: its events wait in a queue, so that a sink that blocks delays no step."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from ..util.visible import counts, spell, warn_user

# Of batches fewer, because each has a record for every tensor of the model.
_MOST_EVENTS, _MOST_BATCHES = 64, 8
# Seconds that the interpreter's end waits for all sinks together.
_SECONDS = 5.0
_threads: set[SinkThread] = set()


class SinkThread:
    """Queue of events and the thread that hands them to `deliver`.

    An event for which there is no room is dropped and counted. One warning says so. The interpreter's end waits at
    most 5 s.
    """

    def __init__(self, name: str, deliver: Callable[[str, tuple[Any, ...]], object]) -> None:
        self._name = name
        self._deliver = deliver
        self._events: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._process = os.getpid()

    def put(self, event: str, args: tuple[Any, ...]) -> None:
        """Hand the event to the thread, which the first one starts. Never waits."""
        most = {"on_batch": _MOST_BATCHES, "on_close": _MOST_EVENTS + 1}.get(event, _MOST_EVENTS)
        with self._changed:
            if self._is_closed:
                return
            if has_room := len(self._events) < most:
                self._events.append((event, args))
                self._changed.notify_all()
                if self._thread is None:
                    self._start()
        if not has_room:
            counted = f"{self._name} dropped an event"
            counts[counted] += 1
            if counts[counted] == 1:
                warn_user(f"{self._name} is too slow: events are dropped; the run goes on", may_raise=False)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"nanwatch {self._name}", daemon=True)
        try:
            self._thread.start()
            _threads.add(self)
        except RuntimeError as error:  # no more threads, or the interpreter ends
            self._is_closed = True
            warn_user(f"{self._name} gets no thread: {spell(error)}; the run goes on", may_raise=False)

    def close(self) -> None:
        """Let the thread end when it has delivered what waits. Does not wait for it."""
        # A forked child has no such thread, and its lock may be taken for ever.
        if self._process == os.getpid():
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._is_closed)
                if not self._events:
                    break
                event, args = self._events[0]  # which stays until it is delivered
            self._deliver(event, args)
            with self._changed:
                self._events.popleft()
                self._changed.notify_all()
        _threads.discard(self)

    def finish(self, until: float) -> None:
        """Wait until all is delivered or that time has come."""
        if self._process != os.getpid():
            return
        with self._changed:
            if not self._changed.wait_for(lambda: not self._events, max(0.0, until - monotonic())):
                warn_user(f"{self._name} did not take the last {len(self._events)} events", may_raise=False)


@atexit.register
def _finish_all() -> None:
    until = monotonic() + _SECONDS
    for thread in [*_threads]:
        thread.finish(until)
