"""Comparison of the weights that several ranks hold: bit for bit as replicas, and by an optimizer's steps.

A DTensor says by its mesh and its placements which ranks hold the same shard. A plain tensor is held by all ranks of
the process group of the DistributedDataParallel around it. Every other tensor is taken for this rank's own. States of
optimizers are not compared: one that parted shows in the weights after its next step.

A check of replicas takes the fingerprints when a batch begins that follows a step of the optimizer: no weight is half
written then. The first batches after it ask whether another rank had other fingerprints.

Ranks whose weights are equal before a step, and not after it, have stepped with unequal gradients: these were not
reduced, were lost on a rank, or were scaled on some ranks alone. Ranks compare hashes of samples of the weights through
the job's store, and wait for nobody. Where these differ, one rank judges by sketches of the gradients before.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from math import sqrt
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..instrumentation.wrapped_names import parameter_names
from ..numerics import _extension
from ..numerics.ranges import fingerprint_on_device
from ..numerics.readable import local_shard, only_our_dispatch, unreadable
from ..recording.events import StepWeight
from ..report.events import ReplicaDifference
from ..util.job import rank_and_world_size
from ..util.messages import warn_user
from ..util.program import each_parameter
from .consensus import process_group
from .exchange import MOST_RANKS, Exchange, Ranks, Side, Verdict

_MOST_NAMES = 100


class Replicas:
    """The replicated weights of one model. Keeps none of them alive."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self._parallel: list[weakref.ref[DistributedDataParallel]] | None = None

    def weights(self) -> dict[Ranks, dict[str, Tensor]]:
        """Return this rank's part of the weights that other ranks hold too, by those ranks and by name."""
        if (model := self.model()) is None or process_group() is None:
            return {}
        groups, names = self._plain_groups(), parameter_names(model)
        replicated: dict[Ranks, dict[str, Tensor]] = {}
        for weight in each_parameter(model):
            shard = local_shard(weight)
            for ranks in {_mesh_ranks(weight), groups.get(id(weight), ())}:
                if len(ranks) > 1 and id(weight) in names and not unreadable(weight):
                    replicated.setdefault(ranks, {})[names[id(weight)]] = weight if shard is None else shard
        return replicated

    def _wrappers(self) -> Iterator[DistributedDataParallel]:
        if self._parallel is None:
            self._parallel = [*map(weakref.ref, _extension.instances_of(DistributedDataParallel))]
        yield from (wrapper for reference in self._parallel if (wrapper := reference()) is not None)

    def are_local_steps(self) -> bool:
        """Return whether ranks step by themselves for a while, as local SGD does, and average weights later."""
        return any(
            not wrapper.require_backward_grad_sync
            or any("local" in getattr(hook, "__name__", "").lower() for hook, _ in wrapper._comm_hooks)
            for wrapper in self._wrappers()
        )

    def _plain_groups(self) -> dict[int, Ranks]:
        """Return the ranks that hold a plain parameter alike, by its id."""
        groups: dict[int, Ranks] = {}
        for parallel in self._wrappers():
            ranks = tuple(torch.distributed.get_process_group_ranks(parallel.process_group))
            for name, x in parallel.module.named_parameters():
                if name not in parallel.parameters_to_ignore:
                    groups[id(x)] = ranks
        return groups


def _mesh_ranks(x: Any) -> Ranks:
    """Return the ranks that hold the same shard of a DTensor, none for another tensor and for a partial sum."""
    if local_shard(x) is None or any(placement.is_partial() for placement in x.placements):
        return ()
    if (here := x.device_mesh.get_coordinate()) is None:
        return ()
    places = zip(x.placements, here, strict=True)
    index = tuple(slice(None) if placement.is_replicate() else place for placement, place in places)
    return tuple(sorted(x.device_mesh.mesh[index].flatten().tolist()))


def judge(sides: list[Side]) -> Verdict:
    """Return the names that differ, and the ranks that are odd by majority at the first of them."""
    common = [name for name in (sides[0].values if sides else ()) if all(name in s.values for s in sides)]
    differing = [name for name in common if len({side.values[name] for side in sides}) > 1]
    if not differing:
        return {"names": []}
    counts = Counter[int]()
    for side in sides:
        counts[side.values[differing[0]]] += side.num_ranks
    value, most = counts.most_common(1)[0]
    is_majority = 2 * most > counts.total()
    odd = [side for side in sides if side.values[differing[0]] != value] if is_majority else sides
    ranks = sorted(rank for side in odd for rank in side.ranks)[:MOST_RANKS]
    return {
        "names": differing,
        "ranks": [rank for rank, _ in ranks],
        "hosts": [host for _, host in ranks],
        "num_odd": sum(side.num_ranks for side in odd),
        "num_ranks": counts.total(),
        "is_majority": is_majority,
    }


class ReplicaWatch:
    """Part of a Watch with `replicas`: compares what the ranks should hold alike, every `every` steps.

    `num_steps()` is the number of steps that the model has taken. `tell(difference)` is called in the thread of the
    run, when a batch begins or the watch ends. `timeout` are the seconds that a difference waits for ranks that do not
    answer. No error of this leaves it.
    """

    def __init__(
        self,
        model: nn.Module,
        num_steps: Callable[[], int],
        every: int,
        timeout: float,
        tell: Callable[[ReplicaDifference], object],
    ) -> None:
        self.differences: deque[ReplicaDifference] = deque(maxlen=16)
        self._num_steps, self._every, self._tell = num_steps, every, tell
        self._replicas = Replicas(model)
        self._exchange = Exchange("replicas", judge, self._judged, timeout)
        self._exchange.warning = "nanwatch compares replicas no more"
        self._has_warned = False
        self._batch = self._step = 0  # a step is a batch that followed one of the optimizer
        self._latest = 0  # number of steps at the latest of these

    def batch_started(self, batch: int, module: nn.Module | None = None, args: tuple[Any, ...] = ()) -> None:
        """Take the fingerprints, if a check is due, and tell of differences. Never raises."""
        if (number := self._num_steps()) == self._latest or self._exchange.is_over:
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        self._latest, self._batch = number, batch
        self._step += 1
        self._exchange.look()
        if self._step % self._every == 0 and not self._exchange.is_over:
            with self._exchange.ending_by_errors():
                self._check()

    def _check(self) -> None:
        weights = self._replicas.weights()
        for ranks, named in weights.items():
            with torch.no_grad(), only_our_dispatch():
                prints = [fingerprint_on_device(weight.detach()) for weight in named.values()]
            values = {name: int(x) % 2**64 for name, x in zip(named, prints, strict=True)}  # waits for a GPU
            self._exchange.post(ranks, self._step // self._every, values, {})
        if not weights and not self._has_warned:
            self._has_warned = True
            why = "neither DistributedDataParallel nor a replicated DTensor says which ranks hold the same"
            if process_group() is None:
                why = "torch.distributed is not initialized in this process"
            elif rank_and_world_size()[1] == 1:
                why = "this job has one rank"
            warn_user(f"nanwatch compares no replicas so far, as {why}", may_raise=False)

    def _judged(self, number: int, ranks: Ranks, verdict: Verdict) -> None:
        if names := verdict.pop("names"):
            verdict |= {"tensors": tuple(names[:_MOST_NAMES]), "num_tensors": len(names)}
            verdict |= {name: tuple(verdict[name]) for name in ("ranks", "hosts")}
            verdict |= {"size": len(ranks), "batch": self._batch}
            steps = number * self._every, (number - 1) * self._every
            difference = ReplicaDifference(*steps, **verdict)
            self.differences.append(difference)
            self._tell(difference)

    def remove(self) -> None:
        """End the comparison. Waits for the other ranks' last check, at most 2 s while nothing differs."""
        self._exchange.warning = ""  # rank 0, and the store in it, may have ended
        self.batch_started(self._batch)
        self._exchange.end()


# The comparison of steps.

# Gradients count as unequal when their directions or their norms are so far apart. Kernels that are not deterministic
# give other bits, and are within 1 %.
_APART = 0.05
# Two gradients of fewer elements may have one direction by chance.
_LEAST_DIRECTED = 8
_DIRECTIONS = 8
_SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], (1024, _DIRECTIONS))
# Differences that are judged. Ranks that hold different parts of a model need one or two until they know so.
_MOST_DIFFERENCES = 8


class WeightPrint(NamedTuple):
    """One weight at one check: a hash of its sample, whether it had moved since the check before, its gradient."""

    hash: int
    has_moved: bool
    sketch: list[float]


# A weight's hash of now, and its print at the check before, of each side.
_Pairs: TypeAlias = list[tuple[int | None, WeightPrint | None]]


def sketch_of(gradient: Tensor) -> list[float]:
    """Return sums under a few fixed patterns of signs, then the norm.

    The sums of two gradients of one direction have the ratio of their norms, within rounding.
    """
    wide = gradient.double().cpu().numpy()
    return [*(wide @ _SIGNS[: len(wide)]).tolist(), sqrt(float(wide @ wide))]


def judge_steps(sides: list[Side]) -> Verdict:
    """Return the weights that differ as `names`, and the `faults` among them: kind, name, step, and a rank or -1.

    A side sends the prints of the check `before` and its `step`, and lists of weights: those that are `declared` to be
    shared, the `matrices`, the `directed` ones. `is_over` is True where ranks count their steps differently.
    """
    more = sides[0].more
    verdict: Verdict = {"names": [], "faults": [], "is_over": len({x.values["step "] for x in sides}) > 1}
    # A rank left out a step, or made a forward of its own.
    if verdict["is_over"] or len({side.more["forwards"] for side in sides}) > 1:
        return verdict
    names = dict.fromkeys(name for side in sides for name in side.values)
    del names["step "]
    before = [{name: WeightPrint(*x) for name, x in side.more["before"].items()} for side in sides]
    both = [(side.values, known) for side, known in zip(sides, before, strict=True)]
    pairs: dict[str, _Pairs] = {name: [(now.get(name), was.get(name)) for now, was in both] for name in names}
    parted = [name for name, each in pairs.items() if len({now for now, _ in each}) > 1]
    causes = {name: cause for name in parted if (cause := _cause(pairs[name], sides)) is not None}
    moved = {name for name, each in pairs.items() if any(was and was.hash != now for now, was in each)}
    kept = moved.difference(parted)
    meant, kind = [name for name in causes if _is_meant_alike(name, more, kept, parted)], "not-reduced"
    if {what for name, (what, _) in causes.items() if name in more["directed"]} == {"norm"}:
        kind = "clipping:one-rank"
        # In a model with shards, gradients of one direction are the same gradient.
        meant = [*causes] if more["is_mixed"] else meant
    elif {causes[name][0] for name in meant} == {"zero"}:
        kind = "rank-lost"
    faults = [(kind, name, more["step"], causes[name][1]) for name in meant]
    return {"names": parted, "faults": faults, "is_over": any(_is_shifted(pairs[name]) for name in parted)}


def _is_shifted(pairs: _Pairs) -> bool:
    """Return whether a rank has moved a weight to what another one had at the check before: it is a step behind."""
    hashes = {before.hash for _, before in pairs if before is not None}
    return any(before is not None and before.hash != now and now in hashes for now, before in pairs)


def _is_meant_alike(name: str, more: dict[str, Any], kept: set[str], parted: list[str]) -> bool:
    """Return whether a weight that parted should be equal on all ranks; see StepRanks."""
    if name in more["declared"] or WeightPrint(*more["before"][name]).has_moved:
        return True
    if not kept:
        return bool(more["are_groups_small"])
    matrices, module = {*more["matrices"]}, name.rpartition(".")[0]
    are_siblings = any(matrix.rpartition(".")[0] == module for matrix in matrices)
    return not are_siblings and not kept.isdisjoint(matrices) and matrices.isdisjoint(parted)


def _cause(pairs: _Pairs, sides: list[Side]) -> tuple[str, int] | None:
    """Return what was unequal of a gradient (zero, norm, direction), and the first rank with a zero, or -1."""
    sketches = [np.array(before.sketch) for _, before in pairs if before is not None]
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

    A DistributedDataParallel and the placements of DTensors say who holds a weight. Any other weight counts as shared
    by all ranks only if it was equal on them at the first check, and one of these shows that it should stay so: it was
    equal after a step too; beside shards, its gradients have one direction on all ranks; all gradients were reduced
    over groups of fewer ranks; it belongs to a norm, and all matrices stay equal. Shards and experts that begin equal
    have none of these.
    """

    def __init__(self, model: nn.Module, timeout: float) -> None:
        self._replicas = Replicas(model)
        self._exchange = Exchange("steps", judge_steps, self._judged, timeout)
        self._number = self._step = self._num_forwards = self._num_differences = 0
        self._prints: dict[str, WeightPrint] = {}  # of each weight's latest check: optimizers step in turn
        self._faults: list[tuple[str, str, int, int]] = []

    def check(self, step: int, num_forwards: int, weights: Sequence[StepWeight]) -> None:
        """Send what this rank is about to step with. Makes nothing outside a job of several ranks."""
        if self._exchange.is_over or process_group() is None:
            return
        size = rank_and_world_size()[1]
        with self._exchange.ending_by_errors():
            if size == 1 or self._replicas.are_local_steps():
                self._exchange.has_ended = True
                return
            self._exchange.look()
            if not self._exchange.has_ended and self._num_differences < _MOST_DIFFERENCES:
                self._number += 1
                self._post(step, num_forwards, weights, size)

    def _post(self, step: int, num_forwards: int, weights: Sequence[StepWeight], size: int) -> None:
        owners = {name: ranks for ranks, named in self._replicas.weights().items() for name in named}
        everybody, groups = tuple(range(size)), defaultdict[Ranks, list[StepWeight]](list)
        for weight in weights:
            ranks = owners.get(weight.name, everybody if local_shard(weight.tensor) is None else ())
            groups[ranks].append(weight)
        groups.pop((), None)  # those that this rank alone holds
        known = {
            "step": self._step,
            "forwards": num_forwards - self._num_forwards,
            "declared": [*owners],
            "matrices": [weight.name for weight in weights if weight.tensor.ndim > 1],
            "directed": [weight.name for weight in weights if len(weight.values) >= _LEAST_DIRECTED],
            "are_groups_small": all((weight.group_size or size) < size for weight in weights),
            "is_mixed": self._num_differences > 0,
        }
        self._step, self._num_forwards = step, num_forwards
        for ranks, group in groups.items():
            before = {x.name: self._prints[x.name] for x in group if x.name in self._prints}
            values = {"step ": step} | {weight.name: self._print(weight) for weight in group}
            self._exchange.post(ranks, self._number, values, {**known, "before": before})

    def _print(self, weight: StepWeight) -> int:
        with torch.no_grad(), only_our_dispatch():
            sample = weight.values.float().cpu().numpy().tobytes() + repr(tuple(weight.tensor.shape)).encode()
            now = int.from_bytes(blake2b(sample, digest_size=8).digest(), "little")
            sketch = sketch_of(weight.values[:0] if weight.gradient is None else weight.gradient)
        known = self._prints.get(weight.name)
        self._prints[weight.name] = WeightPrint(now, known is not None and known.hash != now, sketch)
        return now

    def _judged(self, number: int, ranks: Ranks, verdict: Verdict) -> None:
        self._num_differences += 1
        self._exchange.has_ended |= verdict["is_over"]
        self._faults += [] if self._exchange.has_ended else verdict["faults"]

    def faults(self) -> list[tuple[str, str, int, int]]:
        """Return the faults that became certain since the last call: kind, weight, step, and a rank or -1."""
        self._exchange.look()
        faults, self._faults = self._faults, []
        return faults

    def remove(self) -> None:
        """End the comparison. Waits for the other ranks' last check, at most 2 s while nothing differs."""
        self._exchange.end()
