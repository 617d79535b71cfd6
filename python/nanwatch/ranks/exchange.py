"""Comparison of values that ranks should hold alike, through the job's store: no thread, no collective, no waiting.

While all is well a rank sends one compare-and-set of a digest at each check, and asks at a few steps after it whether
anybody saw another digest. After a difference the ranks of each digest send the values behind it once, and one rank
judges for all.
"""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import torch

from ..util.job import rank_and_world_size
from ..util.messages import spell, suppressed, warn_user
from .consensus import default_store, own_store, process_group

Ranks: TypeAlias = tuple[int, ...]
Verdict: TypeAlias = dict[str, Any]
Judge: TypeAlias = "Callable[[list[Side]], Verdict]"

_KEPT = 8  # checks whose values are kept. Ranks that are further apart are not compared.
_LOOKS = 16  # steps after a check at which a rank asks for differences
_MOST_DIGESTS = 16  # whose values are judged. There are more where each rank goes its own way.
MOST_RANKS = 8  # that are named for each digest
_PAUSE = 0.02  # seconds, at the end of the comparison
FAREWELL = 2.0  # seconds that a rank waits at its end for the others' last check
_numbers: Counter[str] = Counter()  # of this process's comparisons, by kind: no two have the same keys


class Side(NamedTuple):
    """Ranks that had one digest: how many, the first of them with their hosts, and their values.

    `values` were compared. `more` was sent with them, for the judgement.
    """

    num_ranks: int
    ranks: list[tuple[int, str]]
    values: dict[str, int]
    more: dict[str, Any]


class _Check(NamedTuple):
    number: int
    values: dict[str, int]
    more: dict[str, Any]


class Exchange:
    """This rank's part in the comparisons of one watch, for each group of ranks that share weights.

    All ranks make the first check in a process group in the same order. `judge(sides)` returns a verdict for JSON, with
    the `names` to leave out from now on. `take(check, ranks, verdict)` gets each verdict. A difference waits `timeout`
    seconds for ranks that do not report.
    """

    def __init__(self, kind: str, judge: Judge, take: Callable[..., object], timeout: float) -> None:
        self._kind, self._judge, self._take, self._timeout = kind, judge, take, timeout
        self._job: Callable[[], Any] = lambda: None
        self._groups: dict[Ranks, _Group] = {}
        self._process, self._looks, self.has_ended = os.getpid(), 0, False
        self.warning = ""  # of an error that ends the comparisons

    @property
    def is_over(self) -> bool:
        """Return whether the comparisons have ended, or this is a child of the process that makes them."""
        return self.has_ended or os.getpid() != self._process

    @contextmanager
    def ending_by_errors(self) -> Iterator[None]:
        """Suppress an error of the block and end the comparisons: the store may have gone, or the network."""
        try:
            yield
        except Exception as error:
            suppressed("ranks could not be compared")
            self.has_ended = True
            if self.warning:
                warn_user(f"{self.warning}: {spell(error)}", may_raise=False)

    def post(self, ranks: Ranks, number: int, values: dict[str, int], more: dict[str, Any]) -> None:
        """Compare the values of check `number`, which counts up, with those of the other ranks."""
        if self._job() is not (job := process_group()):
            self._job, self._groups = weakref.ref(job), {}
            _numbers[self._kind] += 1
            self._store = own_store(f"{self._kind}/{_numbers[self._kind]}", default_store())
        if ranks not in self._groups:
            store = torch.distributed.PrefixStore(f"{hash(ranks):x}", self._store)  # type: ignore[attr-defined]
            self._groups[ranks] = _Group(store, len(ranks), self._judge, self._timeout)
        self._groups[ranks].add(_Check(number, values, more))
        self._looks = _LOOKS

    def _present(self) -> dict[Ranks, _Group]:
        return self._groups if not self.is_over and self._job() is process_group() else {}

    def look(self) -> None:
        """Take the verdicts that came since the last call. Asks nobody long after a check. Never raises."""
        with self.ending_by_errors():
            groups = self._present()
            if self._looks or any(group.pending for group in groups.values()):
                self._looks = max(0, self._looks - 1)
                for ranks, group in groups.items():
                    if (answer := group.look()) is not None:
                        self._take(answer[0], ranks, answer[1])

    def end(self) -> None:
        """Wait for the other ranks' last check, at most 2 s, 4 s with a difference. Take the last verdicts."""
        with self.ending_by_errors():
            begun, groups = time.monotonic(), self._present()
            for ranks, group in groups.items():
                while time.monotonic() - begun < FAREWELL * (1 + bool(group.pending)):
                    have_left = group.have_left()  # and before that, posted all their checks
                    if (answer := group.look(is_over=True)) is not None:
                        self._take(answer[0], ranks, answer[1])
                    elif have_left and not group.pending:
                        break
                    else:
                        group.leave()
                        time.sleep(_PAUSE)
            if groups and rank_and_world_size()[0] == 0:
                time.sleep(5 * _PAUSE)  # its process may hold the store, and others ask it once more
        self.has_ended = True


class _Group:
    """Keys of one group of ranks. Each difference begins a new generation of them, so that no rank meets an old one."""

    def __init__(self, store: Any, size: int, judge: Judge, timeout: float) -> None:
        self._store, self._size, self._judge, self._timeout = store, size, judge, timeout
        self._checks: deque[_Check] = deque(maxlen=_KEPT)
        self._seen: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._generation, self._left = 0, -1  # the latest generation in which it has left
        self.pending = 0  # the check with a difference that has no verdict yet, 0: none
        self._deadline = 0.0

    def _get(self, name: str) -> bytes | None:
        key = f"{self._generation}/{name}"
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def _count(self, name: str, more: int = 1) -> int:
        return int(self._store.add(f"{self._generation}/{name}", more))

    def _keep_first(self, name: str, value: str, present: str = "") -> str:
        return str(self._store.compare_set(f"{self._generation}/{name}", present, value).decode())

    def add(self, check: _Check) -> None:
        self._checks.append(check)
        self._post(check)

    def _post(self, check: _Check) -> None:
        """Compare with the digest that the first rank to come has left. A slot holds the latest check."""
        slot = f"slot/{check.number % _KEPT}"
        mine, latest = f"{check.number} {self._digest(check)}", self._seen.get(slot, "")
        while not latest or int(latest.partition(" ")[0]) < check.number:
            latest = self._keep_first(slot, mine, latest)
        self._seen[slot] = latest
        if latest != mine and int(latest.partition(" ")[0]) == check.number:
            self._keep_first("differ", str(check.number))

    def _digest(self, check: _Check) -> str:
        total = blake2b(digest_size=12)
        for name, value in check.values.items():
            if name not in self._left_out:
                total.update(f"{name}\0{value:x}\0".encode(errors="backslashreplace"))
        return total.hexdigest()

    def look(self, *, is_over: bool = False) -> tuple[int, Verdict] | None:
        if not self.pending:
            number = int(self._get("differ") or 0)
            # A rank that is behind comes to that check first, or its values would not count.
            if not number or not (is_over or (self._checks and self._checks[-1].number >= number)):
                return None
            self.pending, self._deadline = number, time.monotonic() + self._timeout
            self._report()
        verdict = self._get("verdict")
        if verdict is None:
            if self._count("reported", 0) < self._size and time.monotonic() < self._deadline:
                return None
            verdict = self._keep_first("verdict", json.dumps(self._judge([*self._sides()]))).encode()
        number, self.pending = self.pending, 0
        judged: Verdict = json.loads(verdict)
        self._left_out.update(judged["names"])
        self._generation += 1
        self._seen.clear()
        for check in self._checks:
            if check.number > number:  # a cause is at one check, and its effect at the next
                self._post(check)
        return number, judged

    def _report(self) -> None:
        """Send what this rank had at that check, unless it has forgotten."""
        check = next((check for check in self._checks if check.number == self.pending), None)
        if check is not None:
            digest = self._digest(check)
            place = self._count(f"count/{digest}")
            if place <= MOST_RANKS:
                here = f"{rank_and_world_size()[0]} {socket.gethostname()}"
                self._keep_first(f"rank/{digest}/{place}", here)
            if place == 1 and (number := self._count("sides")) <= _MOST_DIGESTS:
                packed = zlib.compress(json.dumps([digest, check.values, check.more]).encode())
                self._store.set(f"{self._generation}/side/{number}", packed)
        self._count("reported")

    def _sides(self) -> Iterator[Side]:
        for number in range(1, min(self._count("sides", 0), _MOST_DIGESTS) + 1):
            if (packed := self._get(f"side/{number}")) is None:
                continue
            digest, values, more = json.loads(zlib.decompress(packed))
            count = self._count(f"count/{digest}", 0)
            answers = [self._get(f"rank/{digest}/{i}") for i in range(1, min(count, MOST_RANKS) + 1)]
            ranks = [answer.decode().partition(" ") for answer in answers if answer is not None]
            values = {name: value for name, value in values.items() if name not in self._left_out}
            yield Side(count, [(int(rank), host) for rank, _, host in ranks], values, more)

    def leave(self) -> None:
        """Say that this rank posts no more in this generation, unless it still waits for a verdict."""
        if not self.pending and self._left < self._generation:
            self._left = self._generation
            self._count("left")

    def have_left(self) -> bool:
        return self._count("left", 0) >= self._size
