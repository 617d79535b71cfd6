"""Comparison of values that ranks should hold alike, through the job's store: no thread, no collective, no waiting.

While all is well a rank sends one compare-and-set of a digest at each check, and asks at a few steps after it whether
anybody saw another digest. After a difference the ranks of each digest send the values behind it once, and one rank
judges for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import torch

from ..util.job import rank_and_world_size, store_key
from ..util.visible import suppressed
from .consensus import own_store

Ranks: TypeAlias = tuple[int, ...]
Verdict: TypeAlias = dict[str, Any]

_KEPT = 8  # checks whose values are kept; ranks that are further apart are not compared
_LOOKS = 16  # steps after a check at which a rank asks for differences
_MOST_DIGESTS = 16  # whose values are looked at. More differ where each rank goes its own way
MOST_RANKS = 8  # named of each digest
_PAUSE = 0.02  # seconds, at the end of the comparison
FAREWELL = 2.0  # seconds that a rank waits at its end for the others' last check
# Reference to the present process group, and the number of comparisons so far in it.
_named: list[Any] = [None, 0]


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
    """Part of this rank in the comparisons of one watch, of several groups of ranks. Ranks begin them in one order.

    `judge(sides)` returns a verdict for JSON, with the `names` to leave out from now on. `timeout` are the seconds that
    a difference waits for ranks that do not report. Nothing here raises: a store that has gone ends the comparison.
    """

    def __init__(self, kind: str, judge: Callable[[list[Side]], Verdict], timeout: float) -> None:
        group = torch.distributed.group.WORLD
        if _named[0] is None or _named[0]() is not group:
            _named[:] = weakref.ref(group), 0
        _named[1] += 1
        self.error: Exception | None = None
        self._job, self._process = _named[0], os.getpid()
        self._prefix = f"nanwatch/{kind}/{store_key()}/{_named[1]}"
        self._store = own_store(self._prefix)
        self._judge, self._timeout = judge, timeout
        self._groups: dict[Ranks, _Group] = {}
        self._looks = 0

    @property
    def is_over(self) -> bool:
        """Return whether the process group or the process is not that of the beginning, or the store has gone."""
        is_gone = self._job() is not torch.distributed.group.WORLD or self._process != os.getpid()
        return is_gone or self.error is not None

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the process that held the store has ended, or the network
            suppressed("ranks could not be compared")
            self.error = error

    def post(self, ranks: Ranks, number: int, values: dict[str, int], more: dict[str, Any]) -> None:
        """Compare the values of check `number`, which counts up, with those of the other ranks."""
        if self.is_over:
            return
        with self._asking():
            if ranks not in self._groups:
                name = ",".join(map(str, ranks)) if len(ranks) <= MOST_RANKS else f"{hash(ranks):x}"
                store = torch.distributed.PrefixStore(name, self._store)  # type: ignore[attr-defined]
                self._groups[ranks] = _Group(store, len(ranks), self._judge, self._timeout)
            self._groups[ranks].add(_Check(number, values, more))
            self._looks = _LOOKS

    def look(self) -> list[tuple[int, Ranks, Verdict]]:
        """Return the verdicts that came since the last call, with their checks. Asks nobody long after a check."""
        is_awaited = any(group.is_pending for group in self._groups.values())
        if self.is_over or not (self._looks or is_awaited):
            return []
        self._looks = max(0, self._looks - 1)
        verdicts: list[tuple[int, Ranks, Verdict]] = []
        with self._asking():
            for ranks, group in self._groups.items():
                if (verdict := group.look()) is not None:
                    verdicts.append((verdict[0], ranks, verdict[1]))
        return verdicts

    def end(self) -> list[tuple[int, Ranks, Verdict]]:
        """Wait for the other ranks' last check, at most 2 s, 4 s with a difference. Return the last verdicts."""
        begun, verdicts = time.monotonic(), list[tuple[int, Ranks, Verdict]]()
        groups = {} if self.is_over else self._groups
        with self._asking():
            for ranks, group in groups.items():
                while time.monotonic() - begun < FAREWELL * (1 + group.is_pending):
                    have_left = group.have_left()  # and before that, posted all their checks
                    if (verdict := group.look(is_over=True)) is not None:
                        verdicts.append((verdict[0], ranks, verdict[1]))
                    elif have_left and not group.is_pending:
                        break
                    else:
                        group.leave()
                        time.sleep(_PAUSE)
        if groups and rank_and_world_size()[0] == 0:
            time.sleep(5 * _PAUSE)  # its process may hold the store, and others ask it once more
        return verdicts


class _Group:
    """Keys of one group of ranks. Each difference begins a new generation of them, so that no rank meets an old one."""

    def __init__(self, store: Any, size: int, judge: Callable[[list[Side]], Verdict], timeout: float) -> None:
        self._store, self._size, self._judge, self._timeout = store, size, judge, timeout
        self._checks: deque[_Check] = deque(maxlen=_KEPT)
        self._seen: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._generation, self._left = 0, -1  # the latest generation in which it has left
        self._number = 0  # the check of the difference that is known, 0: none
        self._deadline = 0.0

    @property
    def is_pending(self) -> bool:
        """Return whether a difference is known that has no verdict yet."""
        return self._number > 0

    def _key(self, name: str) -> str:
        return f"{self._generation}/{name}"

    def _get(self, name: str) -> bytes | None:
        key = self._key(name)
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def add(self, check: _Check) -> None:
        self._checks.append(check)
        self._post(check)

    def _post(self, check: _Check) -> None:
        """Compare with the digest that the first rank to come has left. A slot holds the latest check."""
        slot = self._key(f"slot/{check.number % _KEPT}")
        mine, latest = f"{check.number} {self._digest(check)}", self._seen.get(slot, "")
        while not latest or int(latest.partition(" ")[0]) < check.number:
            latest = self._store.compare_set(slot, latest, mine).decode()
        self._seen[slot] = latest
        if latest != mine and int(latest.partition(" ")[0]) == check.number:
            self._store.compare_set(self._key("differ"), "", str(check.number))

    def _digest(self, check: _Check) -> str:
        total = blake2b(digest_size=12)
        for name, value in check.values.items():
            if name not in self._left_out:
                total.update(f"{name}\0{value:x}\0".encode(errors="backslashreplace"))
        return total.hexdigest()

    def look(self, *, is_over: bool = False) -> tuple[int, Verdict] | None:
        if not self._number:
            number = int(self._get("differ") or 0)
            # A rank that is behind comes to that check first, or its values would not count.
            if not number or not (is_over or (self._checks and self._checks[-1].number >= number)):
                return None
            self._number, self._deadline = number, time.monotonic() + self._timeout
            self._report()
        verdict = self._get("verdict")
        if verdict is None:
            num_reported = self._store.add(self._key("reported"), 0)
            if num_reported < self._size and time.monotonic() < self._deadline:
                return None
            mine = json.dumps(self._judge(self._sides()))
            verdict = self._store.compare_set(self._key("verdict"), "", mine)
        number, self._number = self._number, 0
        judged: Verdict = json.loads(verdict)
        self._left_out.update(judged["names"])
        self._generation += 1
        for check in self._checks:
            if check.number > number:  # a cause is at one check, and its effect at the next
                self._post(check)
        return number, judged

    def _report(self) -> None:
        """Send what this rank had at that check, unless it has forgotten."""
        check = next((check for check in self._checks if check.number == self._number), None)
        if check is not None:
            digest = self._digest(check)
            place = self._store.add(self._key(f"count/{digest}"), 1)
            if place <= MOST_RANKS:
                here = f"{rank_and_world_size()[0]} {socket.gethostname()}"
                self._store.set(self._key(f"rank/{digest}/{place}"), here)
            if place == 1:
                number = self._store.add(self._key("digests"), 1)
                if number <= _MOST_DIGESTS:
                    packed = zlib.compress(json.dumps([check.values, check.more]).encode())
                    self._store.set(self._key(f"values/{digest}"), packed)
                    self._store.set(self._key(f"digest/{number}"), digest)
        self._store.add(self._key("reported"), 1)

    def _sides(self) -> list[Side]:
        sides = []
        for number in range(1, min(self._store.add(self._key("digests"), 0), _MOST_DIGESTS) + 1):
            digest = (self._get(f"digest/{number}") or b"").decode()
            packed = self._get(f"values/{digest}")
            count = self._store.add(self._key(f"count/{digest}"), 0)
            answers = [self._get(f"rank/{digest}/{i}") for i in range(1, min(count, MOST_RANKS) + 1)]
            ranks = [answer.decode().partition(" ") for answer in answers if answer is not None]
            if packed is not None and ranks:
                values, more = json.loads(zlib.decompress(packed))
                values = {name: value for name, value in values.items() if name not in self._left_out}
                sides.append(Side(count, [(int(rank), host) for rank, _, host in ranks], values, more))
        return sides

    def leave(self) -> None:
        """Say that this rank posts no more in this generation, unless it still waits for a verdict."""
        if not self.is_pending and self._left < self._generation:
            self._left = self._generation
            self._store.add(self._key("left"), 1)

    def have_left(self) -> bool:
        return bool(self._store.add(self._key("left"), 0) >= self._size)
