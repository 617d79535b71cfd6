"""Simulated ranks before a simulated store, by events: the real protocols, with time that only counts.

The store serves one call after the other. A rank's next event is one method of its protocol, whose calls follow each
other without a gap; between two events other ranks come. Bytes are a TCPStore's requests and answers, without TCP's.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from nanwatch.distributed import consensus, replica_thread
from nanwatch.distributed.consensus import StoreProtocol
from nanwatch.distributed.replica_store import ReplicaProtocol, digest
from nanwatch.distributed.replicas import Print
from nanwatch.report.finding import Finding, RankObservation

SERVICE = 1 / 55_000  # seconds that the store needs for a call (docs/verdict.md)
TRIP = 100e-6  # seconds there and back
STEP = 1.0  # seconds of a step of the training
EVERY = 100  # steps between two checks
TENSORS = 1000
TIMEOUT = 30.0
LOST, SLOW, LATE = (
    16,
    0.01,
    5.0,
)  # ranks that do not answer; the share of ranks that are late, and by how many seconds

Events = Generator[float, None, None]


class Store:
    """Keys and values, and a clock: each call moves the clock of the rank that makes it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.now = 0.0
        self.free = 0.0
        self.busy = 0.0
        self.messages = self.sent = self.received = 0

    def _serve(self, key: str, sent: int, received: int) -> None:
        begun = max(self.now + TRIP / 2, self.free)
        self.free = begun + SERVICE
        self.busy += SERVICE
        self.now = self.free + TRIP / 2
        self.messages += 1
        self.sent += 9 + len(key) + sent
        self.received += received

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        held = self.values.get(key)
        if (held is None and not expected) or (held is not None and held == expected.encode()):
            held = self.values[key] = wanted.encode()
        held = expected.encode() if held is None else held
        self._serve(key, 16 + len(expected) + len(wanted), 8 + len(held))
        return held

    def add(self, key: str, number: int) -> int:
        total = int(self.values.get(key, b"0")) + number
        self.values[key] = str(total).encode()
        self._serve(key, 8, 8)
        return total

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value if isinstance(value, bytes) else value.encode()
        self._serve(key, 8 + len(value), 0)

    def get(self, key: str) -> bytes:
        self._serve(key, 0, 8 + len(self.values[key]))
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._serve(keys[0], 8, 1)
        return keys[0] in self.values


class Part:
    """A part of the store under a prefix, as torch's PrefixStore."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(key: Any, *rest: Any) -> Any:
            own = [self._prefix + one for one in key] if isinstance(key, list) else self._prefix + key
            return method(own, *rest)

        return call


@dataclass
class Played:
    """A scenario: what all ranks asked together, and when the last of them knew."""

    scenario: str
    ranks: int
    messages: int = 0
    bytes: int = 0
    busy: float = 0.0  # seconds in which the store served calls
    seconds: float = 0.0  # from the check, or from the failure, until all ranks that live know
    right: int = 0
    told: int = 0
    keys: int = 0
    by_rank: dict[int, Any] = field(default_factory=dict, repr=False)


def run(store: Store, ranks: dict[int, Events]) -> float:
    """Play all ranks to their end; return when the last one ended."""
    number = itertools.count()
    ahead = [(0.0, next(number), rank) for rank in ranks]
    heapq.heapify(ahead)
    last = 0.0
    while ahead:
        at, _, rank = heapq.heappop(ahead)
        store.now = at
        try:
            pause = next(ranks[rank])
        except StopIteration:
            last = max(last, store.now)
            continue
        heapq.heappush(ahead, (store.now + pause, next(number), rank))
    return last


def begins(rank: int, way: str, chance: random.Random) -> float:
    """Return how long after the first one a rank comes: within a tenth of a step, or late."""
    return chance.random() * STEP / 10 + LATE * (way == "slow" and chance.random() < SLOW)


def replicas(size: int, group: int, way: str) -> Played:
    """One check of all ranks, in groups of this size; `way` says what is wrong."""
    store, chance = Store(), random.Random(0)
    odd = None if way == "healthy" else group // 3
    lost = set(range(size - LOST, size)) if way == "lost" else set()
    played = Played(f"replicas, {way}, groups of {group:,}", size)
    even = {f"model.layers.{i}.weight": Print("weight", i) for i in range(TENSORS)}
    other = even | {"model.layers.17.weight": Print("weight", 0)}
    digests = {id(one): digest(one, set()) for one in (even, other)}
    attempts = 2 if way == "restart" else 1

    def rank_of(rank: int, attempt: int) -> Events:
        prefix = f"nanwatch/replicas/{'0' * 36}/{attempt}/1/{rank // group}/"
        protocol = ReplicaProtocol(Part(store, prefix), rank, min(group, size))  # type: ignore[arg-type]
        prints = other if rank == odd and attempt == attempts - 1 else even
        yield begins(rank, way, chance)
        if not protocol.post(1, digests[id(prints)]):
            protocol.tell_difference(1)
        looks = [*replica_thread._LOOKS]
        interval = max(replica_thread._INTERVAL, size / replica_thread._MOST_QUESTIONS)
        while len(looks) < 3 + 4:
            looks.append(looks[-1] + interval)
        before = 0.0
        for at in looks if way != "healthy" and rank // group == 0 else looks[:3]:
            if protocol.difference() is not None:
                break
            yield at - before
            before = at
        else:
            return
        begun = store.now
        if protocol.report(digests[id(prints)], prints, "node-0000.cluster.internal"):
            protocol.judge()
        pause, longest = replica_thread._PAUSES
        while (verdict := protocol.get("verdict")) is None:
            yield pause
            pause = min(2 * pause, longest)
            if store.now - begun > TIMEOUT:
                protocol.judge()
        protocol.agreed("at", 3)
        protocol.end()
        played.told += 1
        played.right += f'"ranks": [{odd}]'.encode() in verdict and b'"is_majority": true' in verdict

    for attempt in range(attempts):
        live = {rank: rank_of(rank, attempt) for rank in range(size) if rank not in lost}
        begun, store.now = store.now, 0.0
        store.free = 0.0
        del begun
        played.seconds = run(store, live)
    return finished(played, store)


def first_failure(size: int, way: str) -> Played:
    """One rank has a non-finite value, and all settle at their next batch."""
    store, chance = Store(), random.Random(0)
    first = size // 3
    lost = set(range(size - LOST, size)) if way == "lost" else set()
    played = Played(f"first failure, {way}", size)
    found = Finding(
        "model.layers.17.mlp.down_proj", "Linear", "output", 812, first, "nan", "produced", None, 1, 8, (0,)
    )
    most = consensus._MOST_QUESTIONS

    def rank_of(rank: int, attempt: int) -> Events:
        own = Part(store, f"nanwatch/consensus/{'0' * 36}/{attempt}/0/")
        protocol = StoreProtocol(own, size)  # type: ignore[arg-type]
        looks = max(consensus._INTERVAL, size / most)
        yield begins(rank, way, chance)
        if rank == first:
            protocol.publish(RankObservation.of(found, rank, 90, (100, 0), "0123456789abcdef"))
        else:
            while not protocol.has_news():
                yield looks * chance.uniform(0.75, 1.25)
            yield STEP * chance.random()  # until its batch ends
        begun = store.now
        protocol.report()
        pause, longest = consensus._INTERVAL_SETTLING
        longest = max(longest, size / most)
        while not protocol.is_complete() and store.now - begun < TIMEOUT:
            yield pause
            pause = min(2 * pause, longest)
        origin = protocol.origin()
        protocol.leave()
        played.told += 1
        played.right += origin is not None and origin.rank == first
        played.by_rank[rank] = store.now
        until, pause = store.now + consensus._FAREWELL, consensus._INTERVAL_SETTLING[0]
        while not lost and not protocol.all_left() and store.now < until:
            yield pause
            pause = min(2 * pause, longest)

    for attempt in range(2 if way == "restart" else 1):
        played.told = played.right = 0
        store.free = 0.0
        run(store, {rank: rank_of(rank, attempt) for rank in range(size) if rank not in lost})
        played.seconds = max(played.by_rank.values())
    return finished(played, store)


def finished(played: Played, store: Store) -> Played:
    played.messages, played.bytes, played.busy = store.messages, store.sent + store.received, store.busy
    played.keys = len(store.values)
    return played


def play_all(size: int) -> list[Played]:
    """Every scenario: replicas in one group and in groups of 256, and the agreement on the first failure."""
    ways = ("odd", "lost", "slow", "restart")
    return [
        replicas(size, size, "healthy"),
        replicas(size, min(256, size), "healthy"),
        *(replicas(size, size, way) for way in ways),
        replicas(size, min(256, size), "odd"),
        *(first_failure(size, way) for way in ("well", *ways[1:])),
    ]


def events_table(played: list[Played]) -> str:
    """A row a scenario, as docs/distributed.md has it."""
    lines = [
        "| | messages | of a rank | MB | store busy | until all know | right | keys |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.scenario} | {one.messages:,} | {one.messages / one.ranks:.1f} | {one.bytes / 1e6:.1f}"
        f" | {one.busy:.2f} s | {one.seconds:.1f} s | {f'{one.right:,} of {one.told:,}' if one.told else '–'}"
        f" | {one.keys:,} |"
        for one in played
    ]
    return "\n".join(lines)
