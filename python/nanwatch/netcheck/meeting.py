"""The key-value store where the ranks meet: who came, who failed first, who has ended.

A rank writes two keys and counts itself four times; while it works it asks one question every `interval` seconds.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..util import reading
from ..util.suppressed import suppressed, suppressing
from .guard import StepError, Trouble
from .place import Place

_RETRY = 0.2  # seconds
_MOST_QUESTIONS = 5000.0  # a second, that one store is asked by all ranks together


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a rank tells the others of itself. `address` is "" where it has none but the master's."""

    rank: int
    world_size: int
    host: str
    local_rank: int
    address: str
    port: int
    token: str
    backend: str
    device: str
    versions: str

    @property
    def name(self) -> str:
        """`rank 3 (host-1)`."""
        return f"rank {self.rank} ({self.host}-{self.local_rank})"


_ARRIVAL: dict[str, reading.Reader[Any]] = {
    name: reading.count if kind == "int" else reading.text for name, kind in Arrival.__annotations__.items()
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a rank ended: with its trouble, or all well."""

    rank: int
    trouble: Trouble | None


_TROUBLE: dict[str, reading.Reader[Any]] = {
    "step": reading.text,
    "why": reading.text,
    "follows": reading.flag,
}

_VERDICT: dict[str, reading.Reader[Any]] = {
    "rank": reading.count,
    "trouble": reading.optional(lambda value, where: Trouble(**reading.members(value, where, _TROUBLE))),
}


def reach(place: Place, remaining: Callable[[], float]) -> str:
    """The address from which this host reaches the master, once something answers there.

    What is refused or not yet known to the name server may be only slow to start: tried until the time is over.
    """
    while True:
        try:
            with socket.create_connection(
                (place.master_addr, place.master_port), timeout=max(_RETRY, min(5.0, remaining() / 2))
            ) as connection:
                return str(connection.getsockname()[0])
        except socket.gaierror as error:
            why = f"the name {place.master_addr} has no address here ({error.strerror})"
        except ConnectionRefusedError:
            why = f"nothing listens at {place.master_addr} port {place.master_port}"
        except TimeoutError:
            why = f"no answer from {place.master_addr} port {place.master_port}: packets to it or from it are lost"
        except OSError as error:
            why = f"{place.master_addr} port {place.master_port} cannot be reached: {error.strerror or error}"
        if remaining() < 2 * _RETRY:
            raise StepError(why)
        time.sleep(_RETRY)


class Meeting:
    """The store of the job, seen by one rank."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._store: Store | None = None
        self.interval = max(0.5, place.world_size / _MOST_QUESTIONS)

    def open(self, timeout: float) -> None:
        """Open the store where this rank hosts it, and connect to it."""
        self._store = self._connect(timeout, self.place.hosts_store)

    def _connect(self, timeout: float, is_master: bool) -> Store:
        store = TCPStore(
            self.place.master_addr,
            self.place.master_port,
            None,
            is_master,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
        return PrefixStore(f"nanwatch/netcheck/{self.place.attempt}", store)

    @property
    def store(self) -> Store:
        """The open store."""
        if self._store is None:
            raise StepError("the store was not reached")
        return self._store

    def listen(self, tell: Callable[[str, bool], None]) -> None:
        """Have `tell` called, once and from another thread, when a rank has failed or the store has gone: with the
        news, and True where it is a rank that has told why.

        Asks over a connection of its own: a question on the other one may hang.
        """
        threading.Thread(target=self._listen, args=(tell,), name="netcheck news", daemon=True).start()

    def _listen(self, tell: Callable[[str, bool], None]) -> None:
        try:
            store = self._connect(60.0, False)
            while not store.check(["first"]):
                time.sleep(self.interval)
            first = _verdict(store.get("first"))
        except Exception:
            suppressed("the store has gone")
            # The host of the store leaves when everybody has ended, also when all is well; `tell` knows which it is.
            where = f"{self.place.master_addr} port {self.place.master_port}"
            tell(f"the store at {where} has gone, and with it the process that held it", False)
            return
        if first.rank != self.place.rank and first.trouble is not None:
            tell(f"rank {first.rank} failed first, in the step {first.trouble.step}", True)

    # Coming.

    def arrive(self, arrival: Arrival) -> None:
        """Tell the others. Raises StepError when this rank's number is taken."""
        mine = json.dumps(asdict(arrival))
        there = self.store.compare_set(_here(arrival.rank), "", mine).decode()
        if there != mine:
            other = _arrival(there.encode())
            raise StepError(
                f"another process on {other.host} is rank {other.rank} already: each rank must be started once"
            )
        if self.store.add("arrived", 1) == arrival.world_size:
            self.store.set("all arrived", "")

    def have_arrived(self) -> bool:
        """Whether all ranks have come."""
        return self.store.check(["all arrived"])

    def missing(self) -> list[int]:
        """The ranks that have not come, in order."""
        return [rank for rank in range(self.place.world_size) if not self.store.check([_here(rank)])]

    def arrival(self, rank: int) -> Arrival:
        """What the rank told of itself."""
        return _arrival(self.store.get(_here(rank)))

    def arrivals(self) -> list[Arrival]:
        """The same of all ranks that have come, in order."""
        if self.have_arrived():
            keys = [_here(rank) for rank in range(self.place.world_size)]
        else:
            absent = set(self.missing())
            keys = [_here(rank) for rank in range(self.place.world_size) if rank not in absent]
        return [_arrival(value) for value in self.store.multi_get(keys)] if keys else []

    def count_linked(self) -> None:
        """Tell that this rank has reached its neighbours."""
        if self.store.add("linked", 1) == self.place.world_size:
            self.store.set("all linked", "")

    def have_linked(self) -> bool:
        """Whether all ranks have."""
        return self.store.check(["all linked"])

    # Ending.

    def end(self, trouble: Trouble | None) -> bool:
        """Tell the others how this rank has ended; True when it is the first to fail."""
        mine = json.dumps({"rank": self.place.rank, "trouble": None if trouble is None else asdict(trouble)})
        is_first = False
        if trouble is not None:
            is_first = self.store.compare_set("first", "", mine).decode() == mine
        self.store.set(_end(self.place.rank), mine)
        if self.store.add("ended", 1) == self.place.world_size:
            self.store.set("all ended", "")
        return is_first

    def have_ended(self) -> bool:
        """Whether all ranks have ended, well or not."""
        return self.store.check(["all ended"])

    def verdicts(self) -> dict[int, Verdict]:
        """How the ranks ended that have told."""
        if self.have_ended():
            told = list(range(self.place.world_size))
        else:
            told = [rank for rank in range(self.place.world_size) if self.store.check([_end(rank)])]
        values = self.store.multi_get([_end(rank) for rank in told]) if told else []
        return {verdict.rank: verdict for verdict in map(_verdict, values)}

    def first(self) -> Verdict | None:
        """The first rank to fail."""
        return _verdict(self.store.get("first")) if self.store.check(["first"]) else None

    def leave(self, seconds: float) -> None:
        """Let go of the store. Its host stays until all have let go, or for so many seconds."""
        until = time.monotonic() + seconds
        with suppressing("the store was gone when this rank left"):
            left = self.store.add("left", 1)
            while self.place.hosts_store and left < self.place.world_size and time.monotonic() < until:
                time.sleep(0.02)
                left = self.store.add("left", 0)


def _here(rank: int) -> str:
    return f"here/{rank}"


def _end(rank: int) -> str:
    return f"end/{rank}"


def _arrival(value: bytes) -> Arrival:
    return Arrival(**reading.members(json.loads(value), "arrival", _ARRIVAL))


def _verdict(value: bytes) -> Verdict:
    return Verdict(**reading.members(json.loads(value), "verdict", _VERDICT))
