"""This rank as a member of the job, the key-value store where the ranks meet, and the clock over the steps.

A rank writes two keys and counts itself four times. While it works it asks one question every `interval` seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..util.job import store_key, whole_number
from ..util.visible import spell, suppressed, suppressing

_RETRY = 0.2  # seconds
_MOST_QUESTIONS = 5000.0  # a second, from all ranks together to one store
_START = (
    "start it with torchrun (torchrun --nproc_per_node 2 -m nanwatch.netcheck), with srun and MASTER_ADDR and"
    " MASTER_PORT set, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT by hand"
)


class NoRankError(ValueError):
    """The environment does not say which rank this is; the message says what is missing or wrong."""


@dataclass(frozen=True, slots=True)
class Member:
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
    def of(cls, environment: Mapping[str, str]) -> Member:
        """Return the member that the variables of torchrun or SLURM describe. Raises NoRankError."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if not environment.get("RANK") and environment.get("SLURM_PROCID"):
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        required = [*names[:2], "MASTER_ADDR", "MASTER_PORT"]
        if missing := [name for name in required if not environment.get(name)]:
            raise NoRankError(f"{', '.join(missing)} not set; {_START}")
        rank, world_size, port = (_number(environment, name) for name in (*names[:2], "MASTER_PORT"))
        if world_size == 0:
            raise NoRankError(f"{names[1]}=0: there is no rank at all")
        if rank >= world_size:
            raise NoRankError(
                f"{names[0]}={rank} with {names[1]}={world_size}: ranks count from 0 to {world_size - 1}"
            )
        if not 0 < port < 65536:
            raise NoRankError(f"MASTER_PORT={port}: a port is a number from 1 to 65535")
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
    number = whole_number(environment[name])
    if number is None:
        raise NoRankError(f"{name} should be a whole number, not negative, got {environment[name][:60]!r}")
    return number


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


def _outcome(value: bytes) -> tuple[int, Trouble | None]:
    """Return the rank and its trouble from a value that `Meeting.end` wrote."""
    rank, trouble = json.loads(value)
    return rank, None if trouble is None else Trouble(**trouble)


def reach(member: Member, remaining: Callable[[], float]) -> str:
    """Return the address from which this host reaches the master, once something answers there.

    A master that refuses, or that the name server does not know yet, may only be slow: try until the time is over.
    """
    where = f"{member.master_addr} port {member.master_port}"
    while True:
        try:
            patience = max(_RETRY, min(5.0, remaining() / 2))
            with socket.create_connection((member.master_addr, member.master_port), patience) as connection:
                return str(connection.getsockname()[0])
        except socket.gaierror as error:
            why = f"the name {member.master_addr} has no address here ({error.strerror})"
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

    def __init__(self, member: Member) -> None:
        self.member = member
        self.interval = max(0.5, member.world_size / _MOST_QUESTIONS)
        self._store: Store | None = None

    def open(self, timeout: float) -> None:
        """Open the store where this rank hosts it, and connect to it."""
        self._store = self._connect(timeout, self.member.hosts_store)

    def _connect(self, timeout: float, is_master: bool) -> Store:
        host, port, patience = self.member.master_addr, self.member.master_port, timedelta(seconds=timeout)
        store = TCPStore(host, port, None, is_master, timeout=patience, wait_for_workers=False)
        return PrefixStore(f"nanwatch/netcheck/{self.member.attempt}", store)

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
            # A connection of its own: a question on the other one may hang.
            store = self._connect(60.0, False)
            while not store.check(["first"]):
                time.sleep(self.interval)
            rank, trouble = _outcome(store.get("first"))
        except Exception:
            suppressed("the store has gone")
            # The host of the store leaves when all have ended, also when all is well; `tell` knows which it is.
            where = f"{self.member.master_addr} port {self.member.master_port}"
            tell(f"the store at {where} has gone, and with it the process that held it", False)
            return
        if rank != self.member.rank and trouble is not None:
            tell(f"rank {rank} failed first, in the step {trouble.step}", True)

    def count(self, what: str) -> None:
        """Count this rank among those that have "arrived", "linked", "ended" or "left"."""
        self.store.add(what, 1)

    def have_all(self, what: str) -> bool:
        """Return whether all ranks have."""
        return self.store.add(what, 0) >= self.member.world_size

    def _values(self, key: str) -> list[bytes]:
        """Return what the ranks have written under `key/RANK`, in their order."""
        keys = [f"{key}/{rank}" for rank in range(self.member.world_size)]
        written = [one for one in keys if self.store.check([one])]
        return self.store.multi_get(written) if written else []

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
        return sorted({*range(self.member.world_size)} - {one.rank for one in self.arrivals()})

    def arrival(self, rank: int) -> Arrival:
        """Return the arrival of one rank."""
        return Arrival(**json.loads(self.store.get(f"here/{rank}")))

    def arrivals(self) -> list[Arrival]:
        """Return the arrivals of all ranks that have come, in order."""
        return [Arrival(**json.loads(value)) for value in self._values("here")]

    def end(self, trouble: Trouble | None) -> bool:
        """Tell the others how this rank has ended. Return whether it is the first to fail."""
        rank = self.member.rank
        mine = json.dumps([rank, None if trouble is None else asdict(trouble)])
        is_first = trouble is not None and self.store.compare_set("first", "", mine).decode() == mine
        self.store.set(f"end/{rank}", mine)
        self.count("ended")
        return is_first

    def outcomes(self) -> dict[int, Trouble | None]:
        """Return the trouble of each rank that has ended, None where all was well."""
        return dict(map(_outcome, self._values("end")))

    def first(self) -> int | None:
        """Return the first rank to fail."""
        return _outcome(self.store.get("first"))[0] if self.store.check(["first"]) else None

    def leave(self, seconds: float) -> None:
        """Let go of the store. Its host stays until all have let go, or for so many seconds."""
        until = time.monotonic() + seconds
        with suppressing("the store was gone when this rank left"):
            self.count("left")
            while self.member.hosts_store and not self.have_all("left") and time.monotonic() < until:
                time.sleep(0.02)


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TICK = 0.1  # seconds between two checks of the clock
GRACE = 2.0  # seconds from the news of another rank's failure to the end of this one: its own error says more
LAST_RESORT = 15.0  # seconds after the timeout; the clock's own work takes less than 10
_SOURCE_PLACE = re.compile(r"\[/\S+:\d+\] ")  # of torch's build machine


class StepError(RuntimeError):
    """A step failed; the message says how."""


class LinkError(StepError):
    """This rank cannot reach others. That is its own trouble, also when another rank has failed before."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Step that failed, and the reason. `follows`: it only waited for a rank that had failed before."""

    step: str
    why: str
    follows: bool = False


class Guard:
    """Clock over the steps. The first trouble, in any thread, calls `on_trouble` and ends the process with status 1.

    Make it in the main thread. From then on SIGTERM and SIGINT are troubles too: torchrun sends SIGTERM to all ranks of
    a node when one of them has failed.
    """

    def __init__(self, timeout: float, on_trouble: Callable[[Trouble], None]) -> None:
        self._timeout = timeout
        self._on_trouble = on_trouble
        self._news: tuple[float, str, bool] | None = None
        self._stopped = False
        self._ending = threading.Lock()
        self._restart("start")
        # The C part of a handler writes to this pipe at once, also while the main thread is in a native call.
        self._signals, end = os.pipe()
        os.set_blocking(end, False)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda number, frame: None)
        self._thread = threading.Thread(target=self._watch, name="netcheck clock", daemon=True)
        self._thread.start()

    def _restart(self, step: str, detail: str = "") -> None:
        self._step, self._detail, self._deadline = step, detail, time.monotonic() + self._timeout
        faulthandler.dump_traceback_later(self._timeout + LAST_RESORT, exit=True)

    @property
    def remaining(self) -> float:
        """Seconds until the step must have ended."""
        return max(0.0, self._deadline - time.monotonic())

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Restart the clock for a step, and end the process if it raises."""
        self._restart(name)
        try:
            yield
        except Exception as error:
            why = str(error) if isinstance(error, StepError) else _SOURCE_PLACE.sub("", spell(error))
            self.fail(why, is_own=isinstance(error, LinkError))

    def tick(self, detail: str) -> None:
        """Restart the clock for the next part of the step, named by `detail`."""
        self._restart(self._step, detail)

    def hear(self, news: str, follows: bool) -> None:
        """End the process within GRACE seconds. `follows`: another rank has reported its failure."""
        self._news = self._news or (time.monotonic(), news, follows)

    def fail(self, why: str, *, is_own: bool = False) -> None:
        """End the process with the trouble; does not return. It follows from news of another's, unless it `is_own`."""
        if self._ending.acquire(blocking=False):
            follows = self._news is not None and self._news[2] and not is_own
            if self._news is not None and self._news[1] not in why:
                why = f"{why}; {self._news[1]}"
            with suppressing("the trouble of a step could not be told"):
                self._on_trouble(
                    Trouble(self._step, f"{self._detail}: {why}" if self._detail else why, follows)
                )
            os._exit(1)
        threading.Event().wait()  # the thread that was first ends the process

    def stop(self) -> None:
        """Stop the clock and reset the signals after the last step."""
        self._stopped = True
        faulthandler.cancel_dump_traceback_later()
        self._thread.join()
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def _watch(self) -> None:
        while not self._stopped:
            if select.select([self._signals], [], [], _TICK)[0]:
                self.fail(f"stopped by {signal.Signals(os.read(self._signals, 1)[0]).name}")
            now = time.monotonic()
            if now > self._deadline and not self._stopped:
                self.fail(f"no answer within {self._timeout:g} s")
            if self._news is not None and now > self._news[0] + GRACE and not self._stopped:
                self.fail(self._news[1])
