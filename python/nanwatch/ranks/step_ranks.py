"""Comparison of an optimizer's steps over the ranks: whose weights part, and how their gradients differed before.

Ranks whose weights are equal before a step, and not after it, have stepped with unequal gradients: these were not
reduced, were lost on a rank, or were scaled on some ranks alone. Ranks compare hashes of samples of the weights through
the job's store, and wait for nobody. Where these differ, one rank judges by sketches of the gradients before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..numerics.readable import local_shard, only_our_dispatch
from ..recording.events import RankFault, StepWeight
from ..util.job import rank_and_world_size
from .exchange import Exchange, Ranks, Side, Verdict
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


class WeightPrint(NamedTuple):
    """One weight at one check: a hash of its sample, whether it had moved since the check before, its gradient."""

    hash: int
    has_moved: bool
    sketch: list[float]


def _hash(x: Tensor, shape: Sequence[int]) -> int:
    values = x.float().cpu().numpy().tobytes() + repr(tuple(shape)).encode()
    return int.from_bytes(blake2b(values, digest_size=8).digest(), "little")


def sketch_of(gradient: Tensor) -> list[float]:
    """Return sums under a few fixed patterns of signs, then the norm.

    The sums of two gradients of one direction have the ratio of their norms, within rounding.
    """
    wide = gradient.double().cpu().numpy()
    return [*(wide @ _SIGNS[: len(wide)]).tolist(), sqrt(float(wide @ wide))]


def judge_steps(sides: list[Side]) -> Verdict:
    """Return the weights that differ as `names`, and the `faults` among them: kind, name, and a rank or -1.

    A side sends the prints of the check `before`, and what it knows of the weights: those that somebody says to be
    alike (`said`), the `matrices`, the `directed` ones. `is_over` where ranks count their steps differently.
    """
    if len({side.values["step "] for side in sides}) > 1:
        return {"names": [], "faults": [], "is_over": True}
    # A rank left out a step, or made a forward of its own.
    if len({side.more["forwards"] for side in sides}) > 1:
        return {"names": [], "faults": [], "is_over": False}
    names = [
        name for name in dict.fromkeys(name for side in sides for name in side.values) if name != "step "
    ]
    parted = [name for name in names if len({side.values.get(name) for side in sides}) > 1]
    causes = {name: cause for name in parted if (cause := difference(name, sides)) is not None}
    more, kind = sides[0].more, "not-reduced"
    kept = {name for name in names if name not in parted and _has_moved(name, sides)}
    meant = [name for name in causes if _is_meant_alike(name, more, kept, parted)]
    if {what for name, (what, _) in causes.items() if name in more["directed"]} == {"norm"}:
        kind = "clipping:one-rank"
        # Beside shards, a gradient of the same direction is the same one.
        meant = [*causes] if more["is_mixed"] else meant
    elif {causes[name][0] for name in meant} == {"zero"}:
        kind = "rank-lost"
    return {
        "names": parted,
        "faults": [(kind, name, causes[name][1]) for name in meant],
        "is_over": any(_is_shifted(name, sides) for name in parted),
    }


def _before(side: Side, name: str) -> int | None:
    known = side.more["before"].get(name)
    return known[0] if known else None


def _has_moved(name: str, sides: list[Side]) -> bool:
    return any(side.values.get(name) != (_before(side, name) or side.values.get(name)) for side in sides)


def _is_shifted(name: str, sides: list[Side]) -> bool:
    """Return whether a rank has moved a weight to what another one had at the check before: it is a step behind."""
    pairs = [(side.values[name], _before(side, name)) for side in sides if name in side.values]
    return any(now == was != before for now, before in pairs for _, was in pairs if before is not None)


def _is_meant_alike(name: str, more: dict[str, Any], kept: set[str], parted: list[str]) -> bool:
    """Return whether a weight that parted should be equal on all ranks; see StepRanks."""
    if name in more["said"] or more["before"][name][1]:
        return True
    if not kept:
        return bool(more["are_groups_small"])
    owner = name.rpartition(".")[0]
    are_siblings = any(matrix.rpartition(".")[0] == owner for matrix in more["matrices"])
    return (
        not are_siblings and bool(kept.intersection(more["matrices"])) and not {*parted} & {*more["matrices"]}
    )


def difference(name: str, sides: list[Side]) -> tuple[str, int] | None:
    """Return what was unequal of a gradient (zero, norm, direction), and the first rank with a zero, or -1."""
    sketches = [np.array(side.more["before"][name][2]) for side in sides if name in side.more["before"]]
    norms = [float(sketch[-1]) for sketch in sketches]
    if len(sketches) < len(sides) or not np.isfinite(sketches).all() or not any(norms):
        return None
    if not all(norms):
        return "zero", min(side.ranks[0][0] for side, norm in zip(sides, norms, strict=True) if norm == 0)
    directions = [sketch[:-1] / sketch[-1] for sketch in sketches]
    if any(np.linalg.norm(each - directions[0]) > _APART * sqrt(_DIRECTIONS) for each in directions):
        return "direction", -1
    return ("norm", -1) if max(norms) > (1 + _APART) * min(norms) else None


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
        self._comparison: Exchange | None = None
        self._is_over = False
        self._number = self._num_forwards = self._num_differences = 0
        self._steps: dict[int, int] = {0: 0}  # of each check
        self._prints: dict[str, WeightPrint] = {}  # of the latest check
        self._faults: list[RankFault] = []

    def check(self, step: int, num_forwards: int, weights: Sequence[StepWeight]) -> None:
        """Send what this rank is about to step with. Makes nothing outside a job of several ranks."""
        if self._is_over or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        size, are_local = rank_and_world_size()[1], self._replicas.are_local_steps()
        if self._number == 0 and size > 1 and not are_local:
            self._comparison = Exchange("steps", judge_steps, self._timeout)
        if self._comparison is None or self._comparison.is_over or are_local:
            self._is_over = True
            return
        self._take(self._comparison.look())
        if self._is_over or self._num_differences >= _MOST_DIFFERENCES:
            return
        self._number += 1
        self._steps[self._number] = step
        owners = {name: ranks for ranks, held in self._replicas.weights().items() for name in held}
        world, groups = tuple(range(size)), dict[Ranks, list[StepWeight]]()
        for weight in weights:
            ranks = owners.get(weight.name, world if local_shard(weight.tensor) is None else ())
            if ranks:
                groups.setdefault(ranks, []).append(weight)
        known = {
            "forwards": num_forwards - self._num_forwards,
            "said": [*owners],
            "matrices": [weight.name for weight in weights if weight.tensor.ndim > 1],
            "directed": [weight.name for weight in weights if len(weight.values) >= _LEAST_DIRECTED],
            "are_groups_small": all((weight.group_size or size) < size for weight in weights),
            "is_mixed": self._num_differences > 0,
        }
        self._num_forwards = num_forwards
        before, self._prints = self._prints, {}
        for ranks, group in groups.items():
            values = {"step ": step} | {weight.name: self._print(weight, before) for weight in group}
            self._comparison.post(ranks, self._number, values, {**known, "before": before})

    def _print(self, weight: StepWeight, before: dict[str, WeightPrint]) -> int:
        with torch.no_grad(), only_our_dispatch():
            now = _hash(weight.values, weight.tensor.shape)
            sketch = sketch_of(weight.values[:0] if weight.gradient is None else weight.gradient)
        known = before.get(weight.name)
        self._prints[weight.name] = WeightPrint(now, known is not None and known.hash != now, sketch)
        return now

    def _take(self, verdicts: Iterable[tuple[int, Ranks, Verdict]]) -> None:
        for number, _, verdict in verdicts:
            self._num_differences += 1
            self._is_over = self._is_over or verdict["is_over"]
            faults = [] if self._is_over else verdict["faults"]
            step = self._steps.get(number - 1, 0)
            self._faults += [RankFault(kind, name, step, rank) for kind, name, rank in faults]

    def faults(self) -> list[RankFault]:
        """Return the faults that became certain since the last call."""
        if self._comparison is not None and not self._is_over:
            self._take(self._comparison.look())
        faults, self._faults = self._faults, []
        return faults

    def remove(self) -> None:
        """End the comparison. Waits for the other ranks' last check, at most 2 s while nothing differs."""
        if self._comparison is not None and not self._is_over:
            self._take(self._comparison.end())
        self._is_over = True
