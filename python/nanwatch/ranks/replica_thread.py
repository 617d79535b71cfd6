"""The thread in which a rank compares its replicas with the others', through the job's store.

While all is well it posts a digest at each check, and asks now and then whether another rank saw a difference. After
one, the ranks agree on who is odd, and two of them compare their bits.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ..report.replica import Distance, ReplicaDifference
from ..util.job import rank_and_world_size, store_key
from ..util.visible import suppressed, suppressing
from .consensus import _own_store, default_store
from .replica_bytes import Copy, compare, write
from .replica_store import Prints, ReplicaProtocol, digest
from .replicas import Fingerprints, Ranks

_T = TypeVar("_T")
# Seconds after a check at which a rank asks whether another one saw a difference, and then between two questions. From
# all ranks no more than 2,000 come in a second, of the 55,000 that a store answers.
_LOOKS = (0.1, 0.5, 2.0)
_INTERVAL, _MOST_QUESTIONS = 5.0, 2000.0
_PAUSES = (0.02, 0.5)  # the first and the longest pause while ranks report
# Checks whose fingerprints are kept: the thread may be late, and another rank later.
KEPT = 8
# Seconds from a verdict until both sides copy the tensor: by then all have heard of it.
_MARGIN = 1.5
FAREWELL = 2.0  # seconds that a watch waits at its end for the others' last check
# Reference to the present process group, and the number of watches so far that compare in it.
_named: list[Any] = [None, 0]


class _Check(NamedTuple):
    """A check: its number, the batch that it began, and the fingerprints as they are known."""

    number: int
    batch: int
    prints: dict[Ranks, Prints]


class Wanted(NamedTuple):
    """Copy of a tensor that the run makes at a step, for the thread."""

    at: int
    ranks: Ranks
    name: str
    copies: queue.SimpleQueue[Copy | None]


def _world() -> Any:
    return torch.distributed.group.WORLD


def _next_name() -> str:
    """Return a name for the keys of a watch, the same on all ranks that watch in the same order."""
    group = _world()
    if _named[0] is None or _named[0]() is not group:
        _named[:] = weakref.ref(group), 0
    _named[1] += 1
    return str(_named[1])


class ReplicaThread:
    """The thread of one watch, from its construction to `stop()`."""

    protocol = ReplicaProtocol
    key = "replicas"
    most_waiting = KEPT // 2  # checks: where the store is slower than the run, only the latest are posted

    def __init__(self, every: int, timeout: float, output_dir: Path | None) -> None:
        self.found: deque[ReplicaDifference] = deque()
        self.wanted: Wanted | None = None
        self._every, self._timeout, self._output_dir = every, timeout, output_dir
        self._rank, self._size = rank_and_world_size()
        self._job = weakref.ref(_world())
        self._store: Any = default_store()
        self._prefix = f"nanwatch/{self.key}/{store_key(os.environ)}/{_next_name()}"
        self._jobs: queue.SimpleQueue[tuple[int, int, Fingerprints] | None] = queue.SimpleQueue()
        self._protocols: dict[Ranks, ReplicaProtocol] = {}
        self._checks: deque[_Check] = deque(maxlen=KEPT)
        self._before: Fingerprints | None = None
        self._buffers: dict[str, int] = {}
        # Known to differ. They are left out from the check `quiet` on, when all ranks know it, and none is made before.
        self._left_out: dict[Ranks, set[str]] = {}
        self._quiet: dict[Ranks, int] = {}
        self._told: set[tuple[Ranks, str]] = set()
        self.step = 0  # the run's present one
        self._seconds = 1.0  # a step takes
        self._until: float | None = None  # no later when the watch ends
        self._thread = threading.Thread(target=self._run, name="nanwatch replicas", daemon=True)
        self._thread.start()
        # A daemon thread that comes back from native code into an interpreter that is ending takes the process down.
        atexit.register(self._end)
        self.is_alive, self.join = self._thread.is_alive, self._thread.join

    def put(self, number: int, batch: int, prints: Fingerprints, seconds: float) -> None:
        """Compare these fingerprints. `seconds` is how long a step takes."""
        self._seconds = seconds
        self._jobs.put((number, batch, prints))

    def is_gone(self) -> bool:
        """Return whether the process group is another one than when this began."""
        return self._job() is not _world()

    def stop(self) -> None:
        """Let the thread end, after at most the time that ranks wait for each other."""
        self._until = time.monotonic() + FAREWELL
        self._jobs.put(None)
        atexit.unregister(self._end)

    def _end(self) -> None:
        self.stop()
        self._until = 0.0
        self._thread.join(FAREWELL)

    # The methods below run in the thread.

    def _run(self) -> None:
        try:
            store, self._store = _own_store(self._store, self._prefix), None
            self._compare(store)
        except Exception:  # the process that held the store has ended, or the network: the job will notice
            suppressed("the store could not be asked about replicas")

    def _compare(self, store: Any) -> None:
        looks: list[float] = []
        while True:
            interval = max(_INTERVAL, self._size / _MOST_QUESTIONS)
            try:
                job = self._jobs.get(timeout=max(0.0, looks[0] - time.monotonic()) if looks else interval)
            except queue.Empty:
                looks = looks[1:]
                self._look()
                continue
            if job is None:
                break
            number, batch, prints = job
            check = _Check(number, batch, prints.read(self._before, self._buffers))
            self._before = prints
            self._checks.append(check)
            if self._jobs.qsize() < self.most_waiting:
                self._post(store, check)
            self._look()
            looks = [time.monotonic() + after for after in _LOOKS]
        for protocol in self._protocols.values():
            protocol.leave()
        for ranks, protocol in self._protocols.items():
            while self._has_time():
                have_left = protocol.all_left()  # and before that, told of their differences
                if not self._look_at(ranks, protocol, is_over=True):
                    if have_left:
                        break
                    time.sleep(_PAUSES[0])
        if self._rank == 0 and self._protocols:
            time.sleep(5 * _PAUSES[0])  # its process may hold the store, and others ask it once more

    def _has_time(self) -> bool:
        return self._until is None or time.monotonic() < self._until

    def _post(self, store: Any, check: _Check) -> None:
        for ranks, prints in check.prints.items():
            if check.number < self._quiet.get(ranks, 0):
                continue
            protocol = self._protocols.get(ranks)
            if protocol is None:
                from torch.distributed import PrefixStore  # type: ignore[attr-defined]

                named = ",".join(map(str, ranks)) if len(ranks) < 9 else f"{hash(ranks):x}"
                own = PrefixStore(named, store)
                protocol = self._protocols[ranks] = self.protocol(own, self._rank, len(ranks))
            if not protocol.post(check.number, digest(prints, self._left_out.get(ranks, set()))):
                self._differs(ranks, protocol, check.number)

    def _differs(self, ranks: Ranks, protocol: ReplicaProtocol, number: int) -> None:
        protocol.tell_difference(number)

    def _look(self) -> None:
        for ranks, protocol in self._protocols.items():
            self._look_at(ranks, protocol)

    def _look_at(self, ranks: Ranks, protocol: ReplicaProtocol, *, is_over: bool = False) -> bool:
        number = protocol.difference()
        # A rank that is behind comes to that check first, or its own fingerprints would not count.
        if number is None or not (is_over or (self._checks and self._checks[-1].number >= number)):
            return False
        self._settle(ranks, protocol, number)
        protocol.end()
        return True

    def _verdict(self, ranks: Ranks, protocol: ReplicaProtocol, number: int) -> dict[str, Any]:
        """Return what `judge` says of a difference, no names where no rank has judged in time."""
        until = time.monotonic() + self._timeout
        prints = next((one.prints.get(ranks) for one in self._checks if one.number == number), None)
        spelt = "" if prints is None else digest(prints, self._left_out.get(ranks, set()))
        if protocol.report(spelt, prints, socket.gethostname()):
            protocol.judge()
        packed = self._wait(lambda: protocol.get("verdict"), until)
        if packed is None:
            protocol.judge()
            packed = self._wait(lambda: protocol.get("verdict"), until + self._timeout / 3)
        return dict(json.loads(packed)) if packed is not None else {"names": []}

    def _settle(self, ranks: Ranks, protocol: ReplicaProtocol, number: int) -> None:
        """Agree with the other ranks on a difference, and have it told."""
        verdict = self._verdict(ranks, protocol, number)
        at = protocol.agreed("at", self.step + max(2, round(_MARGIN / self._seconds)))
        self._quiet[ranks] = -(-at // self._every)
        self._left_out.setdefault(ranks, set()).update(verdict["names"], verdict.get("own", ()))
        names = [name for name in verdict["names"] if (ranks, name) not in self._told]
        if not names:
            return
        self._told.update((ranks, name) for name in names)
        batch = next((one.batch for one in self._checks if one.number == number), 0)
        difference = ReplicaDifference(
            step=number * self._every,
            equal_at=(number - 1) * self._every,
            tensors=tuple(names),
            num_tensors=len(names) + verdict["num"] - len(verdict["names"]),
            ranks=tuple(verdict["ranks"]),
            num_odd=verdict["num_odd"],
            hosts=tuple(verdict["hosts"]),
            num_ranks=verdict["num_ranks"],
            size=len(ranks),
            is_majority=verdict["is_majority"],
            pair=(verdict["pair"][0], verdict["pair"][1]),
            batch=batch,
        )
        with suppressing("the bytes of replicas could not be compared"):
            difference = self._with_distance(difference, ranks, protocol, at)
        self.found.append(difference)

    def _with_distance(
        self, difference: ReplicaDifference, ranks: Ranks, protocol: ReplicaProtocol, at: int
    ) -> ReplicaDifference:
        ahead = max(0, at - self.step) * self._seconds
        until = time.monotonic() + self._timeout / 3 + 2 * (ahead + _MARGIN)
        pair = difference.pair
        if self._rank in pair:
            other = pair[1 - pair.index(self._rank)]
            copies: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
            self.wanted = Wanted(at, ranks, difference.tensors[0], copies)
            copy = self._wait(lambda: None if copies.empty() else (copies.get(),), until)
            self.wanted = None
            if copy is not None and copy[0] is not None:
                files = []
                if self._output_dir is not None:
                    folder = self._output_dir / f"replicas-step-{difference.step}"
                    files.append(write(folder, self._rank, difference.tensors[0], copy[0].tensor))

                def exchange(name: str, value: bytes) -> bytes | None:
                    protocol.set(f"{name}/{self._rank}", value)
                    return self._wait(partial(protocol.get, f"{name}/{other}"), until)

                distance, began = compare(copy[0], exchange)
                apart = None if distance is None else asdict(distance)
                told = {"distance": apart, "began": began, "files": files}
                protocol.set(f"distance/{self._rank}", json.dumps(told).encode())
        for one in (self._rank, *pair):
            packed = self._wait(partial(protocol.get, f"distance/{one}"), until) if one in pair else None
            if packed is not None:
                known = json.loads(packed)
                fields = known["distance"]
                distance = None if fields is None else Distance(**{**fields, "bits": tuple(fields["bits"])})
                return replace(
                    difference, distance=distance, began=known["began"], files=tuple(known["files"])
                )
        return difference

    def _wait(self, ask: Callable[[], _T | None], until: float) -> _T | None:
        """Ask again and again until there is an answer."""
        pause, longest = _PAUSES
        while (found := ask()) is None and time.monotonic() < until and self._has_time():
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return found
