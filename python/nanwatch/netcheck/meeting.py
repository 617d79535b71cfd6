"""The place of this rank in the job, and the key-value store where the ranks meet: arrivals, failures, ends.

A rank writes two keys and counts itself four times. While it works it asks one question every `interval` seconds.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..util.job import store_key
from ..util.suppressed import suppressed, suppressing
from .guard import StepError, Trouble

_RETRY = 0.2  # seconds
_MOST_QUESTIONS = 5000.0  # a second, from all ranks together to one store
_START = (
    "start it with torchrun (torchrun --nproc_per_node 2 -m nanwatch.netcheck), with srun and MASTER_ADDR and"
    " MASTER_PORT set, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT by hand"
)


class PlaceError(ValueError):
    """The environment does not say which rank this is; the message says what is missing or wrong."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank: its numbers, its host, and the address and port of the store where all ranks meet.

    `hosts_store`: this process opens the store itself. `attempt` tells one start of the job from another in one store.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    master_addr: str
    master_port: int
    hosts_store: bool
    attempt: str

    @property
    def name(self) -> str:
        """`host-localrank`."""
        return f"{self.host}-{self.local_rank}"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Read the place from the variables of torchrun or SLURM. Raises PlaceError."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if not environment.get("RANK") and environment.get("SLURM_PROCID"):
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        required = [*names[:2], "MASTER_ADDR", "MASTER_PORT"]
        if missing := [name for name in required if not environment.get(name)]:
            raise PlaceError(f"{', '.join(missing)} not set; {_START}")
        rank, world_size, port = (_number(environment, name) for name in (*names[:2], "MASTER_PORT"))
        if world_size == 0:
            raise PlaceError(f"{names[1]}=0: there is no rank at all")
        if rank >= world_size:
            raise PlaceError(
                f"{names[0]}={rank} with {names[1]}={world_size}: ranks count from 0 to {world_size - 1}"
            )
        if not 0 < port < 65536:
            raise PlaceError(f"MASTER_PORT={port}: a port is a number from 1 to 65535")
        return cls(
            rank=rank,
            world_size=world_size,
            # With one rank per host, started by hand, it is often not set.
            local_rank=_number(environment, names[2]) if environment.get(names[2]) else 0,
            host=socket.gethostname(),
            master_addr=environment["MASTER_ADDR"],
            master_port=port,
            hosts_store=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=store_key(environment),
        )


def _number(environment: Mapping[str, str], name: str) -> int:
    given = environment[name]
    # isdigit is True for more than int() reads, and int() refuses 5,000 digits.
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise PlaceError(f"{name} should be a whole number, not negative, got {given[:60]!r}")
    return int(given)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank as it introduces itself to the others. `address` is "" where it has none but the master's."""

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


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a rank: with its trouble, or None when all was well."""

    rank: int
    trouble: Trouble | None

    @classmethod
    def of(cls, value: bytes) -> Outcome:
        """Read a value that `Meeting.end` wrote."""
        rank, trouble = json.loads(value)
        return cls(rank, None if trouble is None else Trouble(**trouble))


def reach(place: Place, remaining: Callable[[], float]) -> str:
    """Return the address from which this host reaches the master, once something answers there.

    A master that refuses, or that the name server does not know yet, may only be slow: try until the time is over.
    """
    where = f"{place.master_addr} port {place.master_port}"
    while True:
        try:
            patience = max(_RETRY, min(5.0, remaining() / 2))
            with socket.create_connection((place.master_addr, place.master_port), patience) as connection:
                return str(connection.getsockname()[0])
        except socket.gaierror as error:
            why = f"the name {place.master_addr} has no address here ({error.strerror})"
        except ConnectionRefusedError:
            why = f"nothing listens at {where}"
        except TimeoutError:
            why = f"no answer from {where}: packets to it or from it are lost"
        except OSError as error:
            why = f"{where} cannot be reached: {error.strerror or error}"
        if remaining() < 2 * _RETRY:
            raise StepError(why)
        time.sleep(_RETRY)


class Meeting:
    """The store of the job, seen by one rank."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.interval = max(0.5, place.world_size / _MOST_QUESTIONS)
        self._store: Store | None = None

    def open(self, timeout: float) -> None:
        """Open the store where this rank hosts it, and connect to it."""
        self._store = self._connect(timeout, self.place.hosts_store)

    def _connect(self, timeout: float, is_master: bool) -> Store:
        host, port, patience = self.place.master_addr, self.place.master_port, timedelta(seconds=timeout)
        store = TCPStore(host, port, None, is_master, timeout=patience, wait_for_workers=False)
        return PrefixStore(f"nanwatch/netcheck/{self.place.attempt}", store)

    @property
    def store(self) -> Store:
        """The open store."""
        if self._store is None:
            raise StepError("the store was not reached")
        return self._store

    def listen(self, tell: Callable[[str, bool], None]) -> None:
        """Call `tell`, once and from another thread, when a rank has failed or the store has gone.

        It gets the news, and True where a rank has reported its failure.
        """
        threading.Thread(target=self._listen, args=(tell,), name="netcheck news", daemon=True).start()

    def _listen(self, tell: Callable[[str, bool], None]) -> None:
        try:
            store = self._connect(
                60.0, False
            )  # a connection of its own: a question on the other one may hang
            while not store.check(["first"]):
                time.sleep(self.interval)
            first = Outcome.of(store.get("first"))
        except Exception:
            suppressed("the store has gone")
            # The host of the store leaves when all have ended, also when all is well; `tell` knows which it is.
            where = f"{self.place.master_addr} port {self.place.master_port}"
            tell(f"the store at {where} has gone, and with it the process that held it", False)
            return
        if first.rank != self.place.rank and first.trouble is not None:
            tell(f"rank {first.rank} failed first, in the step {first.trouble.step}", True)

    def count(self, what: str) -> None:
        """Count this rank among those that have "arrived", "linked", "ended" or "left"."""
        self.store.add(what, 1)

    def have_all(self, what: str) -> bool:
        """Return whether all ranks have."""
        return self.store.add(what, 0) >= self.place.world_size

    def _ranks(self, key: str) -> list[int]:
        """Return the ranks that have written their `key/RANK`."""
        return [rank for rank in range(self.place.world_size) if self.store.check([f"{key}/{rank}"])]

    def _values(self, key: str) -> list[bytes]:
        keys = [f"{key}/{rank}" for rank in self._ranks(key)]
        return self.store.multi_get(keys) if keys else []

    def arrive(self, arrival: Arrival) -> None:
        """Introduce this rank to the others. Raises StepError when its number is taken."""
        mine, rank = json.dumps(asdict(arrival)), arrival.rank
        there = self.store.compare_set(f"here/{rank}", "", mine).decode()
        if there != mine:
            host = json.loads(there)["host"]
            raise StepError(
                f"another process on {host} is rank {rank} already: each rank must be started once"
            )
        self.count("arrived")

    def missing(self) -> list[int]:
        """Return the ranks that have not come, in order."""
        return sorted({*range(self.place.world_size)} - {*self._ranks("here")})

    def arrival(self, rank: int) -> Arrival:
        """Return the arrival of one rank."""
        return Arrival(**json.loads(self.store.get(f"here/{rank}")))

    def arrivals(self) -> list[Arrival]:
        """Return the arrivals of all ranks that have come, in order."""
        return [Arrival(**json.loads(value)) for value in self._values("here")]

    def end(self, trouble: Trouble | None) -> bool:
        """Tell the others how this rank has ended. Return whether it is the first to fail."""
        rank = self.place.rank
        mine = json.dumps([rank, None if trouble is None else asdict(trouble)])
        is_first = trouble is not None and self.store.compare_set("first", "", mine).decode() == mine
        self.store.set(f"end/{rank}", mine)
        self.count("ended")
        return is_first

    def outcomes(self) -> dict[int, Outcome]:
        """Return the ends of all ranks that have ended."""
        return {one.rank: one for one in map(Outcome.of, self._values("end"))}

    def first(self) -> Outcome | None:
        """Return the first rank to fail."""
        return Outcome.of(self.store.get("first")) if self.store.check(["first"]) else None

    def leave(self, seconds: float) -> None:
        """Let go of the store. Its host stays until all have let go, or for so many seconds."""
        until = time.monotonic() + seconds
        with suppressing("the store was gone when this rank left"):
            self.count("left")
            while self.place.hosts_store and not self.have_all("left") and time.monotonic() < until:
                time.sleep(0.02)
