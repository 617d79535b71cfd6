"""Damaged black boxes: each is read, and gives a report, or a ValueError or OSError, in time and in bounded memory."""

from __future__ import annotations

import json
import mmap
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from nanwatch.blackbox.box_file import MAGIC
from nanwatch.blackbox.story import read_black_box
from nanwatch.cli.blackbox import look

LIMIT = 10.0  # seconds for a file that takes 10 ms
MOST_MEMORY = 256 << 20  # bytes more than after the first file
_WEIGHTS = {
    "page": 20,
    "state": 25,
    "threads": 4,
    "stacks": 8,
    "calls": 8,
    "batches": 8,
    "facts": 6,
    "notes": 5,
}
_WEIGHTS |= {"names": 12, "frames": 14, "samples": 3}
_NUMBERS = (0, 1, 7, 64, 4096, 1 << 15, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)


class _Hangs(BaseException):
    """A file was read for too long."""


@dataclass
class Tally:
    """Outcome of reading damaged files: counts of reports and errors, and the first faults of the reader."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0
    memory: int = 0

    @property
    def is_right(self) -> bool:
        return not self.faults and self.memory <= MOST_MEMORY


def judge_mutations(path: Path, num_mutations: int, seed: int = 0) -> Tally:
    """Read so many mutations of the black box at `path`, which is changed in place and restored."""
    dice, tally = random.Random(seed), Tally()
    whole = path.read_bytes()
    places = _places(whole)
    before = signal.signal(signal.SIGALRM, _alarm)
    least = 0
    try:
        for number in range(num_mutations):
            with _mutated(path, whole, places, dice) as words:
                began = time.monotonic()
                signal.setitimer(signal.ITIMER_REAL, LIMIT)
                try:
                    tally.counts[_read(path, number)] += 1
                except (ValueError, OSError) as error:
                    tally.counts[type(error).__name__] += 1
                    if not _is_clear(error):
                        tally.faults.append(f"{words}: {error!r}")
                except _Hangs:
                    tally.faults.append(f"{words}: takes over {LIMIT:.0f} s")
                except Exception as error:
                    tally.faults.append(f"{words}: {error!r}")
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                tally.slowest = max(tally.slowest, time.monotonic() - began)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            least = least or peak
            tally.memory = peak - least
    finally:
        signal.signal(signal.SIGALRM, before)
    return tally


def _read(path: Path, number: int) -> str:
    if number % 3:
        read_black_box(path)
        return "report"
    seen = look(path)
    if number % 9 == 0:
        json.dumps(seen.document, allow_nan=False)
    if number % 99 == 0:
        seen.page()
    return "look"


def _is_clear(error: ValueError | OSError) -> bool:
    """Return whether the reader itself refused the file: errors of numpy, json or struct begin otherwise."""
    return isinstance(error, OSError) or str(error).startswith(("is ", "has "))


def _alarm(number: int, frame: FrameType | None) -> None:
    raise _Hangs


def _places(data: bytes) -> list[tuple[int, int]]:
    """Return beginnings and ends of the sections, as often as they are to be met."""
    found = {"page": (0, data.index(b"\0"))}
    for line in data[len(MAGIC) : data.index(b"\0")].decode().splitlines():
        name, at, count, width, *_ = line.split(" ")
        # Only what is written: zeros after it tell nothing.
        end = len(data[int(at) : int(at) + int(count) * int(width)].rstrip(b"\0")) + int(at)
        found[name] = int(at), max(end, int(at) + 1)
    return [found[name] for name, weight in _WEIGHTS.items() for _ in range(weight)]


@contextmanager
def _mutated(path: Path, whole: bytes, places: list[tuple[int, int]], dice: random.Random) -> Iterator[str]:
    """Damage the file, and restore it."""
    kind = dice.random()
    if kind < 0.02:  # another length
        size = dice.choice(
            (dice.randrange(len(whole)), dice.randrange(8192), len(whole) + dice.randrange(1 << 16))
        )
        with open(path, "r+b") as file:
            file.truncate(size)
            try:
                yield f"{size} bytes"
            finally:
                at = min(size, len(whole))
                file.truncate(at)
                file.seek(at)
                file.write(whole[at:])
        return
    changes: dict[int, bytes] = {}
    for _ in range(dice.choice((1, 1, 1, 2, 4, 16))):
        begin, end = dice.choice(places)
        at = dice.randrange(begin, end)
        if begin == 0:
            changes[at] = bytes([dice.choice((dice.randrange(256), ord("0") + dice.randrange(10)))])
        elif kind < 0.5:
            changes[at] = bytes([dice.choice((0, 255, 127, 128, dice.randrange(256)))])
        else:
            width = dice.choice((4, 8))
            number = dice.choice((*_NUMBERS, dice.randrange(1 << 24))) % (1 << 8 * width)
            changes[at - at % width] = number.to_bytes(width, "little")
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        try:
            for at, new in changes.items():
                view[at : at + len(new)] = new
            yield f"{changes}"
        finally:
            for at, new in changes.items():
                view[at : at + len(new)] = whole[at : at + len(new)]
