"""Comparison of audited steps over the ranks: whose weights part, and how their gradients differed before.

Ranks whose weights are equal before a step, and not after it, have stepped with unequal gradients: these were not
reduced, were lost on a rank, or were scaled on some ranks alone. Ranks send hashes and sketches of samples through
ReplicaThread, which waits for nobody in the thread of the run.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..numerics.readable import Numbers, local_shard, only_our_dispatch
from ..recording.step_weight import RankFault, StepWeight
from ..util.job import rank_and_world_size
from .replica_store import Prints, ReplicaProtocol, Side
from .replica_thread import FAREWELL, KEPT, ReplicaThread
from .replicas import Fingerprints, Print, Ranks, Replicas

# Gradients count as unequal when their directions or their norms are so far apart. Kernels that are not deterministic
# give other bits, and are within 1 %.
_APART = 0.05
# Fewer elements may have one direction by chance.
_LEAST_DIRECTED = 8
_DIRECTIONS = 8
_SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], (1024, _DIRECTIONS))
# Differences that are looked at. Ranks that hold different parts of a model need one or two until they know it.
_MOST_DIFFERENCES = 8


class _Verdict(NamedTuple):
    """Difference at a check: weights that are not equal, and gradients that are not though their weights are.

    Of each gradient: what differs (zero, norm, direction), and the first rank with a zero, or -1. `kept` are weights
    that are equal on all ranks, and have changed since the check before. `is_over` where ranks count steps differently.
    """

    number: int
    weights: list[str]
    gradients: dict[str, tuple[str, int]]
    kept: set[str]
    is_over: bool


class _Known(NamedTuple):
    is_said: bool  # somebody says who holds the weight
    is_directed: bool
    is_matrix: bool
    is_in_small_group: bool


class _Unequal(NamedTuple):
    """Gradient that was not equal at a check, while its weight was, and had moved with the other ranks' before."""

    number: int
    what: str
    rank: int
    has_moved: bool


class StepPrints(Fingerprints):
    """Hashes and sketches of the samples of one check, for ReplicaThread, which reads them."""

    def __init__(self, step: int, num_forwards: int, weights: Sequence[tuple[StepWeight, Ranks]]) -> None:
        self._step = Print("state", step, writes=num_forwards)
        self._weights = [
            (one.name, ranks, tuple(one.tensor.shape), one.values.device) for one, ranks in weights
        ]
        self._hashes: dict[str, int] = {}
        by_device: dict[torch.device, list[Tensor]] = {}
        for one, _ in weights:
            gradient = one.values[:0] if one.gradient is None else one.gradient
            by_device.setdefault(one.values.device, []).extend((one.values.float(), gradient.float()))
        self._samples = {
            device: ([len(one) for one in own], Numbers(torch.cat(own))) for device, own in by_device.items()
        }

    def read(self, before: Fingerprints | None, last: dict[str, int]) -> dict[Ranks, Prints]:
        """Return the prints of this check by the ranks that hold the weights. Those of `before` were read."""
        samples = {
            device: iter(numbers.tensor().split(lengths))
            for device, (lengths, numbers) in self._samples.items()
        }
        self._samples = {}
        found: dict[Ranks, Prints] = {}
        for name, ranks, shape, device in self._weights:
            values, gradient = next(samples[device]).numpy(), next(samples[device]).numpy()
            now = self._hashes[name] = _hash(values, shape)
            old = before._hashes.get(name, now) if isinstance(before, StepPrints) else now
            prints = found.setdefault(ranks, {"step ": self._step})
            prints[name] = Print("weight", now)
            prints[f"was {name}"] = Print("weight", old, is_kept=False)
            prints[f"gradient {name}"] = Print("state", _hash(gradient, shape))
            prints[f"sketch {name}"] = Print("state", _sketch(gradient), is_kept=False)
        return found


def _hash(values: Any, shape: tuple[int, ...]) -> int:
    return int.from_bytes(blake2b(values.tobytes() + repr(shape).encode(), digest_size=8).digest(), "little")


def _sketch(gradient: Any) -> int:
    """Return the norm and sums under a few fixed patterns of signs, as the bits of float32 in one number.

    The sums of two gradients of one direction have the ratio of their norms, within rounding.
    """
    wide = gradient.astype(np.float64)
    sums = np.append(wide @ _SIGNS[: len(wide)], sqrt(float(wide @ wide)))
    return int.from_bytes(sums.astype(np.float32).tobytes(), "little")


def _unsketched(value: int) -> Any:
    return np.frombuffer(value.to_bytes(4 * (_DIRECTIONS + 1), "little"), np.float32).astype(np.float64)


def judge_steps(sides: list[Side]) -> dict[str, Any]:
    """Return the names that differ, weights and gradients as in a _Verdict, and whether ranks count differently."""
    if len({side.prints["step "].value for side in sides}) > 1:
        return {"names": [], "weights": [], "gradients": {}, "is_over": True}
    # A rank left out a step, or made a forward of its own.
    if len({side.prints["step "] for side in sides}) > 1:
        return {"names": []}
    names = dict.fromkeys(name for side in sides for name, one in side.prints.items() if one.is_kept)
    differing = [name for name in names if len({side.prints.get(name) for side in sides}) > 1]
    weights = [name for name in differing if " " not in name]
    whole = [name.removeprefix("gradient ") for name in differing if " " in name]
    found = {name: _difference(name, sides) for name in whole if name not in weights}
    return {
        "names": differing,
        "weights": weights,
        "gradients": {name: one for name, one in found.items() if one is not None},
        "is_over": any(_is_shifted(name, sides) for name in weights),
    }


def _difference(name: str, sides: list[Side]) -> tuple[str, int] | None:
    """Return what is unequal of a gradient, and the first rank whose gradient is zero, or -1."""
    sketches = [_unsketched(side.prints[f"sketch {name}"].value) for side in sides if name in side.prints]
    norms = [float(one[-1]) for one in sketches]
    if len(sketches) < len(sides) or not np.isfinite(sketches).all() or not any(norms):
        return None
    if not all(norms):
        return "zero", min(side.ranks[0][0] for side, norm in zip(sides, norms, strict=True) if norm == 0)
    directions = [one[:-1] / one[-1] for one in sketches]
    if any(np.linalg.norm(one - directions[0]) > _APART * sqrt(_DIRECTIONS) for one in directions):
        return "direction", -1
    return ("norm", -1) if max(norms) > (1 + _APART) * min(norms) else None


def _is_shifted(name: str, sides: list[Side]) -> bool:
    """Return whether a rank has moved a weight to what another one had at the check before: it is a step behind."""
    own = [(one.prints[name].value, one.prints[f"was {name}"].value) for one in sides if name in one.prints]
    return any(now == was != before for now, before in own for _, was in own)


class _Protocol(ReplicaProtocol):
    def judged(self, sides: list[Side]) -> dict[str, Any]:
        return judge_steps(sides)


class _Thread(ReplicaThread):
    protocol = _Protocol
    key = "steps"
    most_waiting = KEPT

    def __init__(self, timeout: float) -> None:
        self.verdicts: deque[_Verdict] = deque()
        self.num_differences = 0
        self._to_tell: dict[Ranks, set[int]] = {}
        super().__init__(1, timeout, None)

    def _differs(self, ranks: Ranks, protocol: ReplicaProtocol, number: int) -> None:
        # A cause is at one check, and its effect at the next: none may be forgotten while ranks agree on another.
        self._to_tell.setdefault(ranks, set()).add(number)
        protocol.tell_difference(min(self._to_tell[ranks]))

    def _look_at(self, ranks: Ranks, protocol: ReplicaProtocol, *, is_over: bool = False) -> bool:
        found = super()._look_at(ranks, protocol, is_over=is_over)
        if found and (later := self._to_tell.get(ranks)):
            protocol.tell_difference(min(later))
        return found

    def _settle(self, ranks: Ranks, protocol: ReplicaProtocol, number: int) -> None:
        self._to_tell.get(ranks, set()).discard(number)
        verdict = self._verdict(ranks, protocol, number)
        self.num_differences += 1
        self._left_out.setdefault(ranks, set()).update(verdict["names"])
        if "weights" not in verdict:
            return
        prints: Prints = next((one.prints.get(ranks, {}) for one in self._checks if one.number == number), {})
        moved = {
            name
            for name, one in prints.items()
            if prints.get(f"was {name}", one) != one._replace(is_kept=False)
        }
        kept = {name for name in moved.difference(verdict["names"]) if " " not in name}
        self.verdicts.append(
            _Verdict(number, verdict["weights"], verdict["gradients"], kept, verdict["is_over"])
        )


class StepRanks:
    """Comparison of the steps of a model over the ranks that hold the same weights.

    A DistributedDataParallel and the placements of DTensors say who holds a weight. Another one counts as held by all
    ranks only if these were equal at the first check, and if something shows that they were meant to stay so: they
    were equal after a step; the gradients have one direction, beside shards; all gradients were reduced over groups of
    fewer ranks; or it is a norm, and all matrices stay equal. Shards and experts that begin alike have none of these.
    """

    def __init__(self, model: nn.Module, timeout: float) -> None:
        self._replicas = Replicas(model)
        self._timeout = timeout
        self._pid = os.getpid()
        self._thread: _Thread | None = None
        self._is_over = False
        self._number = self._num_forwards = 0
        self._steps: dict[int, int] = {}  # of each check
        self._known: dict[str, _Known] = {}
        self._parted: dict[str, int] = {}  # weights, and the first check at which they were not equal
        self._unequal: dict[str, _Unequal] = {}
        self._told: set[str] = set()

    def check(self, step: int, num_forwards: int, weights: Sequence[StepWeight]) -> None:
        """Send what this rank is about to step with. Makes nothing outside a job of several ranks."""
        if self._is_over or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        size = rank_and_world_size()[1]
        is_late = self._thread is None and self._number
        if self._thread is not None and self._thread.num_differences >= _MOST_DIFFERENCES:
            return
        if size < 2 or is_late or os.getpid() != self._pid or self._replicas.are_local_steps():
            self._end()
            return
        if self._thread is None:
            self._thread = _Thread(self._timeout)
            weakref.finalize(self, self._thread.stop).atexit = False
        elif self._thread.is_gone():
            self._end()
            return
        self._number += 1
        self._steps[self._number] = step
        said = {one.name: one.ranks for one in self._replicas.held() if one.kind == "weight"}
        world, held = tuple(range(size)), []
        for one in weights:
            ranks = said.get(one.name, world if local_shard(one.tensor) is None else ())
            if ranks:
                held.append((one, ranks))
                is_small = one.group_size is not None and one.group_size < size
                is_directed = len(one.values) >= _LEAST_DIRECTED
                self._known[one.name] = _Known(one.name in said, is_directed, one.tensor.ndim > 1, is_small)
        if held:
            with torch.no_grad(), only_our_dispatch():
                prints = StepPrints(step, num_forwards - self._num_forwards, held)
                self._thread.put(self._number, 0, prints, 1.0)
        self._num_forwards = num_forwards

    def _end(self) -> None:
        self._is_over = True
        if self._thread is not None:
            self._thread.stop()

    def faults(self) -> list[RankFault]:
        """Return the faults that became certain since the last call."""
        found: list[RankFault] = []
        while not self._is_over and self._thread is not None and self._thread.verdicts:
            found += self._faults(self._thread.verdicts.popleft())
        return found

    def _faults(self, verdict: _Verdict) -> list[RankFault]:
        if verdict.is_over:
            self._end()
            return []
        for name in verdict.weights:
            self._parted.setdefault(name, verdict.number)
        for name, (what, rank) in verdict.gradients.items():
            self._unequal[name] = _Unequal(verdict.number, what, rank, name in verdict.kept)
        causes = {
            name: self._unequal[name]
            for name, number in self._parted.items()
            if name in self._unequal and self._unequal[name].number == number - 1 and name not in self._told
        }
        meant = [name for name in causes if self._is_meant_alike(name, verdict)]
        kind = "not-reduced"
        if {one.what for name, one in causes.items() if self._known[name].is_directed} == {"norm"}:
            kind = "clipping:one-rank"
            # Beside shards, a gradient of the same direction is the same one.
            meant = [*causes] if 1 in self._parted.values() else meant
        elif {causes[name].what for name in meant} == {"zero"}:
            kind = "rank-lost"
        self._told.update(meant)
        return [RankFault(kind, name, self._steps[causes[name].number], causes[name].rank) for name in meant]

    def _is_meant_alike(self, name: str, verdict: _Verdict) -> bool:
        if self._known[name].is_said or self._unequal[name].has_moved:
            return True
        if not verdict.kept:
            return all(one.is_in_small_group for one in self._known.values())
        matrices = {name for name, one in self._known.items() if one.is_matrix}
        are_siblings = any(one.rpartition(".")[0] == name.rpartition(".")[0] for one in matrices)
        return not are_siblings and bool(matrices & verdict.kept) and not matrices & self._parted.keys()

    def remove(self) -> None:
        """End the comparison. Waits for the other ranks' last check, at most 2 s while nothing differs."""
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.stop()
            until = time.monotonic() + 2 * FAREWELL
            while self._thread.is_alive() and time.monotonic() < until:
                self._thread.join(0.02)
