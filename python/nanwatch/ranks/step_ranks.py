"""Comparison of an optimizer's steps over the ranks: whose weights part, and how their gradients differed before.

Ranks whose weights are equal before a step, and not after it, have stepped with unequal gradients: these were not
reduced, were lost on a rank, or were scaled on some ranks alone. Ranks send hashes and sketches of samples through the
job's store, and wait for nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..numerics.readable import local_shard, only_our_dispatch
from ..recording.optimizer_state import RankFault, StepWeight
from ..util.job import rank_and_world_size
from ..util.visible import suppressed
from .exchange import Comparison, Ranks, Side, Verdict
from .replicas import Replicas

# Gradients count as unequal when their directions or their norms are so far apart. Kernels that are not deterministic
# give other bits, and are within 1 %.
_APART = 0.05
# Fewer elements may have one direction by chance.
_LEAST_DIRECTED = 8
_DIRECTIONS = 8
_SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], (1024, _DIRECTIONS))
# Differences that are looked at. Ranks that hold different parts of a model need one or two until they know it.
_MOST_DIFFERENCES = 8


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


class StepPrints:
    """Hashes of the samples of one check by the ranks that hold the weights, and sketches of the gradients.

    `before` are those of the check before. The hash of a gradient is named "gradient NAME".
    """

    def __init__(
        self,
        step: int,
        num_forwards: int,
        weights: Sequence[tuple[StepWeight, Ranks]],
        before: StepPrints | None,
    ) -> None:
        self.values: dict[Ranks, dict[str, int]] = {}
        self.more: dict[Ranks, dict[str, Any]] = {}
        self.hashes: dict[str, int] = {}
        for weight, ranks in weights:
            shape = tuple(weight.tensor.shape)
            gradient = weight.values[:0] if weight.gradient is None else weight.gradient
            sample, direction = weight.values.float().cpu().numpy(), gradient.float().cpu().numpy()
            now = self.hashes[weight.name] = _hash(sample, shape)
            values = self.values.setdefault(ranks, {"step ": step})
            values[weight.name] = now
            values[f"gradient {weight.name}"] = _hash(direction, shape)
            more = self.more.setdefault(ranks, {"forwards": num_forwards, "before": {}, "sketches": {}})
            more["before"][weight.name] = now if before is None else before.hashes.get(weight.name, now)
            more["sketches"][weight.name] = _sketch(direction)


def _hash(values: Any, shape: tuple[int, ...]) -> int:
    return int.from_bytes(blake2b(values.tobytes() + repr(shape).encode(), digest_size=8).digest(), "little")


def _sketch(gradient: Any) -> list[float]:
    """Return sums under a few fixed patterns of signs, then the norm.

    The sums of two gradients of one direction have the ratio of their norms, within rounding.
    """
    wide = gradient.astype(np.float64)
    return [*(wide @ _SIGNS[: len(wide)]).tolist(), sqrt(float(wide @ wide))]


def judge_steps(sides: list[Side]) -> Verdict:
    """Return the names that differ, and the weights among them, equal ones that moved, unequal gradients.

    Of each gradient: what differs (zero, norm, direction), and the first rank with a zero, or -1. `is_over` where ranks
    count their steps differently.
    """
    if len({side.values["step "] for side in sides}) > 1:
        return {"names": [], "weights": [], "gradients": {}, "kept": [], "is_over": True}
    # A rank left out a step, or made a forward of its own.
    if len({side.more["forwards"] for side in sides}) > 1:
        return {"names": []}
    names = dict.fromkeys(name for side in sides for name in side.values)
    differing = [name for name in names if len({side.values.get(name) for side in sides}) > 1]
    weights = [name for name in differing if " " not in name]
    gradients = [name.removeprefix("gradient ") for name in differing if " " in name]
    unequal = {name: _difference(name, sides) for name in gradients if name not in weights}
    return {
        "names": differing,
        "weights": weights,
        "gradients": {name: what for name, what in unequal.items() if what is not None},
        "kept": [
            name for name in names if " " not in name and name not in weights and _has_moved(name, sides)
        ],
        "is_over": any(_is_shifted(name, sides) for name in weights),
    }


def _has_moved(name: str, sides: list[Side]) -> bool:
    return any(side.values.get(name) != side.more["before"].get(name) for side in sides)


def _difference(name: str, sides: list[Side]) -> tuple[str, int] | None:
    """Return what is unequal of a gradient, and the first rank whose gradient is zero, or -1."""
    sketches = [np.array(side.more["sketches"][name]) for side in sides if name in side.more["sketches"]]
    norms = [float(sketch[-1]) for sketch in sketches]
    if len(sketches) < len(sides) or not np.isfinite(sketches).all() or not any(norms):
        return None
    if not all(norms):
        return "zero", min(side.ranks[0][0] for side, norm in zip(sides, norms, strict=True) if norm == 0)
    directions = [sketch[:-1] / sketch[-1] for sketch in sketches]
    if any(np.linalg.norm(each - directions[0]) > _APART * sqrt(_DIRECTIONS) for each in directions):
        return "direction", -1
    return ("norm", -1) if max(norms) > (1 + _APART) * min(norms) else None


def _is_shifted(name: str, sides: list[Side]) -> bool:
    """Return whether a rank has moved a weight to what another one had at the check before: it is a step behind."""
    pairs = [(side.values[name], side.more["before"][name]) for side in sides if name in side.values]
    return any(now == was != before for now, before in pairs for _, was in pairs)


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
        self._comparison: Comparison | None = None
        self._before: StepPrints | None = None
        self._is_over = False
        self._number = self._num_forwards = self._num_differences = 0
        self._steps: dict[int, int] = {}  # of each check
        self._known: dict[str, _Known] = {}
        self._parted: dict[str, int] = {}  # weights, and the first check at which they were not equal
        self._unequal: dict[str, _Unequal] = {}
        self._told: set[str] = set()
        self._faults: list[RankFault] = []

    def check(self, step: int, num_forwards: int, weights: Sequence[StepWeight]) -> None:
        """Send what this rank is about to step with. Makes nothing outside a job of several ranks."""
        if self._is_over or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        self._look()
        size = rank_and_world_size()[1]
        is_late = self._comparison is None and self._number
        if self._num_differences >= _MOST_DIFFERENCES:
            return
        if size < 2 or is_late or os.getpid() != self._pid or self._replicas.are_local_steps():
            self._is_over = True
            return
        if self._comparison is None:
            self._comparison = Comparison("steps", judge_steps, self._timeout)
        self._number += 1
        self._steps[self._number] = step
        owners = {held.name: held.ranks for held in self._replicas.held() if held.kind == "weight"}
        world, compared = tuple(range(size)), []
        for weight in weights:
            ranks = owners.get(weight.name, world if local_shard(weight.tensor) is None else ())
            if ranks:
                compared.append((weight, ranks))
                is_small = weight.group_size is not None and weight.group_size < size
                is_directed = len(weight.values) >= _LEAST_DIRECTED
                is_matrix = weight.tensor.ndim > 1
                self._known[weight.name] = _Known(weight.name in owners, is_directed, is_matrix, is_small)
        if compared:
            with torch.no_grad(), only_our_dispatch():
                forwards = num_forwards - self._num_forwards
                prints = self._before = StepPrints(step, forwards, compared, self._before)
            self._asked(lambda comparison: self._post(comparison, prints))
        self._num_forwards = num_forwards

    def _post(self, comparison: Comparison, prints: StepPrints) -> list[tuple[Ranks, int, Verdict]]:
        for ranks, values in prints.values.items():
            comparison.post(ranks, self._number, values, prints.more[ranks])
        return []

    def _look(self) -> None:
        self._asked(lambda comparison: comparison.look())

    def _asked(self, ask: Callable[[Comparison], list[tuple[Ranks, int, Verdict]]]) -> None:
        """Ask the store, if this process may, and take the verdicts. A store that has gone ends the comparison."""
        if self._is_over or self._comparison is None or os.getpid() != self._pid:
            return
        try:
            verdicts = [] if self._comparison.is_gone() else ask(self._comparison)
            self._is_over = self._is_over or self._comparison.is_gone()
        except Exception:  # the process that held the store has ended, or the network: the job will notice
            suppressed("the store could not be asked about steps")
            self._is_over = True
            return
        for _, number, verdict in verdicts:
            self._num_differences += 1
            if "weights" in verdict and not self._is_over:
                self._take(number, verdict)

    def faults(self) -> list[RankFault]:
        """Return the faults that became certain since the last call."""
        self._look()
        faults, self._faults = self._faults, []
        return faults

    def _take(self, number: int, verdict: Verdict) -> None:
        if verdict["is_over"]:
            self._is_over = True
            return
        kept = set(verdict["kept"])
        for name in verdict["weights"]:
            self._parted.setdefault(name, number)
        for name, (what, rank) in verdict["gradients"].items():
            self._unequal[name] = _Unequal(number, what, rank, name in kept)
        causes = {
            name: self._unequal[name]
            for name, parted in self._parted.items()
            if name in self._unequal and self._unequal[name].number == parted - 1 and name not in self._told
        }
        meant = [name for name in causes if self._is_meant_alike(name, kept)]
        kind = "not-reduced"
        if {cause.what for name, cause in causes.items() if self._known[name].is_directed} == {"norm"}:
            kind = "clipping:one-rank"
            # Beside shards, a gradient of the same direction is the same one.
            meant = [*causes] if 1 in self._parted.values() else meant
        elif {causes[name].what for name in meant} == {"zero"}:
            kind = "rank-lost"
        self._told.update(meant)
        self._faults += [
            RankFault(kind, name, self._steps[causes[name].number], causes[name].rank) for name in meant
        ]

    def _is_meant_alike(self, name: str, kept: set[str]) -> bool:
        if self._known[name].is_said or self._unequal[name].has_moved:
            return True
        if not kept:
            return all(known.is_in_small_group for known in self._known.values())
        matrices = {name for name, known in self._known.items() if known.is_matrix}
        owner = name.rpartition(".")[0]
        are_siblings = any(matrix.rpartition(".")[0] == owner for matrix in matrices)
        return not are_siblings and bool(matrices & kept) and not matrices & self._parted.keys()

    def remove(self) -> None:
        """End the comparison. Waits for the other ranks' last check, at most 2 s while nothing differs."""
        self._asked(lambda comparison: comparison.end())
        self._is_over = True
