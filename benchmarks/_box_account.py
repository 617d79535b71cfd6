"""Account that a program of `judge_blackbox.py` gives of itself, in memory that the judge shares: no nanwatch in it."""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass

import numpy as np

_READY, _THREADS, _KIND, _GRADIENT, _BATCH, _MET = range(6)
_OF_THREAD, _TID, _DEPTH, _ENDED, _STACK = 64, 0, 1, 2, 3
_MOST = 32
FORWARD, GRADIENT, STEP, DATA = 1, 2, 3, 4


@dataclass(frozen=True)
class Trial:
    """One run of the program: `fault` happens in batch `batch`, in the module of number `module`, at `place`."""

    fault: str
    way: str = "script"  # or "run": under `nanwatch run`
    place: str = (
        "before"  # the module's forward, "after" it, in its "backward", in a "step", or at the "data"
    )
    module: int = 0
    batch: int = 0
    folder: str = ""  # the output_dir
    threads: int = 1
    seed: int = 0
    dumps_core: bool = False


class Account:
    """Where each thread is, how many calls ended, and what happened last. Each word is one aligned store."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 8 * _OF_THREAD * (_MOST + 1))
        self._words = np.frombuffer(self._map, np.int64)
        self._own = threading.local()
        self._lock = threading.Lock()

    def clear(self) -> None:
        self._words[:] = 0

    @property
    def is_ready(self) -> bool:
        return bool(self._words[_READY])

    @is_ready.setter
    def is_ready(self, value: bool) -> None:
        self._words[_READY] = value

    @property
    def is_met(self) -> bool:
        """Return whether the fault happened."""
        return bool(self._words[_MET])

    @property
    def fault_thread(self) -> int:
        """Return the thread that met the fault."""
        return int(self._words[_MET])

    def meet(self) -> None:
        self._words[_MET] = threading.get_native_id()

    def _thread(self) -> np.ndarray:
        own: np.ndarray | None = getattr(self._own, "words", None)
        if own is None:
            with self._lock:
                number = int(self._words[_THREADS]) + 1
                own = self._own.words = self._words[number * _OF_THREAD : (number + 1) * _OF_THREAD]
                own[_TID] = threading.get_native_id()
                self._words[_THREADS] = number
        return own

    def begin(self, module: int) -> None:
        own = self._thread()
        own[_STACK + own[_DEPTH]] = module
        own[_DEPTH] += 1
        self._words[_KIND] = FORWARD

    def ended_inner(self) -> None:
        self._thread()[_ENDED] += 1

    def end(self) -> None:
        own = self._thread()
        own[_DEPTH] -= 1
        own[_ENDED] += 1
        self._words[_KIND] = FORWARD

    def gradient(self, module: int) -> None:
        self._words[_GRADIENT] = module
        self._words[_KIND] = GRADIENT

    def step(self) -> None:
        self._words[_KIND] = STEP

    def batch(self, number: int) -> None:
        self._words[_BATCH] = number
        self._words[_KIND] = DATA

    def stacks(self) -> dict[int, tuple[int, ...]]:
        """Return the numbers of the modules under way by thread, the outermost first."""
        found = {}
        for number in range(1, int(self._words[_THREADS]) + 1):
            own = self._words[number * _OF_THREAD : (number + 1) * _OF_THREAD]
            found[int(own[_TID])] = tuple(map(int, own[_STACK : _STACK + own[_DEPTH]]))
        return found

    @property
    def num_ended(self) -> int:
        """Return how many calls ended."""
        return int(self._words[_OF_THREAD:].reshape(_MOST, _OF_THREAD)[:, _ENDED].sum())

    @property
    def latest(self) -> tuple[int, int, int]:
        """Return the kind of what happened last, the batch, and the module whose gradient came last."""
        return int(self._words[_KIND]), int(self._words[_BATCH]), int(self._words[_GRADIENT])


SHARED = Account()
