"""Who this rank is, and the key-value store where the ranks meet: who came, who failed first, who has ended.

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
_MOST_QUESTIONS = 5000.0  # a second, that one store is asked by all ranks together
START = (
    "start it with torchrun (torchrun --nproc_per_node 2 -m nanwatch.netcheck), with srun and MASTER_ADDR and"
    " MASTER_PORT set, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT by hand"
)


class PlaceError(ValueError):
    """The environment does not say who this rank is; the text says what is missing or wrong."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank: its numbers, its host, and the address and port of the store where all ranks meet.

    `hosts_store` is True where this process has to open the store itself. `attempt` tells one start of the job from
    another that meets in the same store.
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
        is_slurm = not environment.get("RANK") and environment.get("SLURM_PROCID")
        names = (
            ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
            if is_slurm
            else ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
        required = [*names[:2], "MASTER_ADDR", "MASTER_PORT"]
        if missing := [name for name in required if not environment.get(name)]:
            raise PlaceError(f"{', '.join(missing)} not set; {START}")
        rank, world_size = (_number(environment, name) for name in names[:2])
        if world_size == 0:
            raise PlaceError(f"{names[1]}=0: there is no rank at all")
        if rank >= world_size:
            raise PlaceError(
                f"{names[0]}={rank} with {names[1]}={world_size}: ranks count from 0 to {world_size - 1}"
            )
        port = _number(environment, "MASTER_PORT")
        if not 0 < port < 65536:
            raise PlaceError(f"MASTER_PORT={port}: a port is a number from 1 to 65535")
        return cls(
            rank=rank,
            world_size=world_size,
            # By hand, with one rank a host, nobody sets it.
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank ended: with its trouble, or all well."""

    rank: int
    trouble: Trouble | None

    @classmethod
    def of(cls, value: bytes) -> Outcome:
        """Read what `Meeting.end` wrote."""
        rank, trouble = json.loads(value)
        return cls(rank, None if trouble is None else Trouble(**trouble))


def reach(place: Place, remaining: Callable[[], float]) -> str:
    """Return the address from which this host reaches the master, once something answers there.

    What is refused or not yet known to the name server may be only slow to start: tried until the time is over.
    """
    address = (place.master_addr, place.master_port)
    where = f"{place.master_addr} port {place.master_port}"
    while True:
        try:
            with socket.create_connection(
                address, timeout=max(_RETRY, min(5.0, remaining() / 2))
            ) as connection:
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
        self._store: Store | None = None
        self.interval = max(0.5, place.world_size / _MOST_QUESTIONS)

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

        It is given the news, and True where a rank has told why. Asks over a connection of its own: a question on the
        other one may hang.
        """
        threading.Thread(target=self._listen, args=(tell,), name="netcheck news", daemon=True).start()

    def _listen(self, tell: Callable[[str, bool], None]) -> None:
        try:
            store = self._connect(60.0, False)
            while not store.check(["first"]):
                time.sleep(self.interval)
            first = Outcome.of(store.get("first"))
        except Exception:
            suppressed("the store has gone")
            # The host of the store leaves when everybody has ended, also when all is well; `tell` knows which it is.
            where = f"{self.place.master_addr} port {self.place.master_port}"
            tell(f"the store at {where} has gone, and with it the process that held it", False)
            return
        if first.rank != self.place.rank and first.trouble is not None:
            tell(f"rank {first.rank} failed first, in the step {first.trouble.step}", True)

    def count(self, what: str) -> None:
        """Count this rank among those that have "arrived", "linked" or "ended"."""
        if self.store.add(what, 1) == self.place.world_size:
            self.store.set(f"all {what}", "")

    def have_all(self, what: str) -> bool:
        """Return whether all ranks have."""
        return self.store.check([f"all {what}"])

    def _ranks(self, key: str, what: str) -> list[int]:
        """Return the ranks that have written their `key/RANK`, without asking for each once all have."""
        ranks = range(self.place.world_size)
        return (
            list(ranks)
            if self.have_all(what)
            else [rank for rank in ranks if self.store.check([f"{key}/{rank}"])]
        )

    def _values(self, key: str, what: str) -> list[bytes]:
        keys = [f"{key}/{rank}" for rank in self._ranks(key, what)]
        return self.store.multi_get(keys) if keys else []

    def arrive(self, arrival: Arrival) -> None:
        """Tell the others. Raises StepError when this rank's number is taken."""
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
        return sorted({*range(self.place.world_size)} - {*self._ranks("here", "arrived")})

    def arrival(self, rank: int) -> Arrival:
        """Return what the rank told of itself."""
        return Arrival(**json.loads(self.store.get(f"here/{rank}")))

    def arrivals(self) -> list[Arrival]:
        """Return the same of all ranks that have come, in order."""
        return [Arrival(**json.loads(value)) for value in self._values("here", "arrived")]

    def end(self, trouble: Trouble | None) -> bool:
        """Tell the others how this rank has ended; True when it is the first to fail."""
        rank = self.place.rank
        mine = json.dumps([rank, None if trouble is None else asdict(trouble)])
        is_first = trouble is not None and self.store.compare_set("first", "", mine).decode() == mine
        self.store.set(f"end/{rank}", mine)
        self.count("ended")
        return is_first

    def outcomes(self) -> dict[int, Outcome]:
        """Return how the ranks ended that have told."""
        return {one.rank: one for one in map(Outcome.of, self._values("end", "ended"))}

    def first(self) -> Outcome | None:
        """Return the first rank to fail."""
        return Outcome.of(self.store.get("first")) if self.store.check(["first"]) else None

    def leave(self, seconds: float) -> None:
        """Let go of the store. Its host stays until all have let go, or for so many seconds."""
        until = time.monotonic() + seconds
        with suppressing("the store was gone when this rank left"):
            left = self.store.add("left", 1)
            while self.place.hosts_store and left < self.place.world_size and time.monotonic() < until:
                time.sleep(0.02)
                left = self.store.add("left", 0)
