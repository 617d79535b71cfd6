"""The weights that other ranks hold too, and their comparison: bit for bit as replicas, and by an optimizer's steps.

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

import contextlib
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import Handles, after_steps, weakly
from ..instrumentation.wrapped_names import named_modules
from ..numerics import _extension
from ..numerics._fingerprint import fingerprint
from ..numerics.readable import local_shard, only_our_dispatch, unreadable
from ..recording.events import StepWeight
from ..report.events import ReplicaDifference
from ..util.job import rank_and_world_size
from ..util.modules import each_parameter
from ..util.visible import spell, suppressed, warn_user
from .exchange import MOST_RANKS, Exchange, Ranks, Side, Verdict

_MOST_NAMES = 100


class Replicas:
    """The replicated weights of one model. Keeps none of them alive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._parallel: list[weakref.ref[DistributedDataParallel]] | None = None

    def weights(self) -> dict[Ranks, dict[str, Tensor]]:
        """Return this rank's part of the weights that other ranks hold too, by those ranks and by name."""
        model = self._model()
        if model is None:
            return {}
        groups = self._plain_groups()
        weights: dict[int, tuple[str, Tensor]] = {}
        for module_name, _, module in named_modules(model):
            for key, x in list(module._parameters.items()):
                if x is not None:
                    weights.setdefault(id(x), (f"{module_name}.{key}" if module_name else key, x))
        replicated: dict[Ranks, dict[str, Tensor]] = {}
        for name, weight in weights.values():
            shard = local_shard(weight)
            for ranks in dict.fromkeys((_mesh_ranks(weight), groups.get(id(weight), ()))):
                if len(ranks) > 1 and not unreadable(weight):
                    replicated.setdefault(ranks, {})[name] = weight if shard is None else shard
        return replicated

    def _wrappers(self) -> Iterator[DistributedDataParallel]:
        if self._parallel is None:
            wrappers = _extension.instances_of(DistributedDataParallel)
            self._parallel = [weakref.ref(wrapper) for wrapper in wrappers]
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
    here = x.device_mesh.get_coordinate()
    if here is None:
        return ()
    index = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(x.placements, here, strict=True)
    )
    return tuple(sorted(x.device_mesh.mesh[index].flatten().tolist()))


def fingerprints(weights: dict[str, Tensor]) -> dict[str, int]:
    """Return the fingerprints of weights, by name. Waits for a GPU."""
    with torch.no_grad(), only_our_dispatch():
        prints = [fingerprint(weight.detach()) for weight in weights.values()]
    return {name: int(value) % 2**64 for name, value in zip(weights, prints, strict=True)}


def judge(sides: list[Side]) -> Verdict:
    """Return the names that differ, and the ranks that are odd by majority at the first of them."""
    total = sum(side.num_ranks for side in sides)
    common = [name for name in (sides[0].values if sides else ()) if all(name in s.values for s in sides)]
    differing = [name for name in common if len({side.values[name] for side in sides}) > 1]
    if not differing:
        return {"names": []}
    counts = Counter[int]()
    for side in sides:
        counts[side.values[differing[0]]] += side.num_ranks
    value, most = counts.most_common(1)[0]
    is_majority = 2 * most > total
    odd = [side for side in sides if side.values[differing[0]] != value] if is_majority else sides
    ranks = sorted(rank for side in odd for rank in side.ranks)[:MOST_RANKS]
    return {
        "names": differing,
        "ranks": [rank for rank, _ in ranks],
        "hosts": [host for _, host in ranks],
        "num_odd": sum(side.num_ranks for side in odd),
        "num_ranks": total,
        "is_majority": is_majority,
    }


class ReplicaWatch:
    """Part of a Watch with `replicas`: compares what the ranks should hold alike, every `every` steps.

    `tell(difference)` is called in the thread of the run, when a batch begins or the watch ends. `timeout` are the
    seconds that a difference waits for ranks that do not answer. No error of this leaves it.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        timeout: float,
        tell: Callable[[ReplicaDifference], object],
    ) -> None:
        self._every, self._timeout, self._tell = every, timeout, tell
        self.differences: deque[ReplicaDifference] = deque(maxlen=16)
        self._model = weakref.ref(model)
        self._replicas = Replicas(model)
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._pid = os.getpid()
        self._has_stepped = False
        self._batch = 0
        self._step = 0  # batches that followed a step of the optimizer
        self._is_off = self._has_warned = False
        self._comparison: Exchange | None = None
        self._hooks = Handles(self, [after_steps.add(weakly(self._stepped))])

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self._has_stepped:
            return
        if optimizer not in self._optimizers:
            model = self._model()
            parameters = {id(x) for group in optimizer.param_groups for x in group["params"]}
            is_models = model is not None and any(id(x) in parameters for x in each_parameter(model))
            self._optimizers[optimizer] = is_models
        self._has_stepped = self._optimizers[optimizer]

    def batch_started(self, batch: int, module: nn.Module | None = None, args: tuple[Any, ...] = ()) -> None:
        """Take the fingerprints, if a check is due, and tell of differences. Never raises."""
        if self._is_off or not self._has_stepped or os.getpid() != self._pid:
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        self._has_stepped, self._batch = False, batch
        self._step += 1
        with self._ending_by_an_error():
            if self._comparison is not None:
                self._tell_all(self._comparison.look())
            if self._step % self._every == 0:
                self._check()

    @contextlib.contextmanager
    def _ending_by_an_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            suppressed("replicas could not be compared")
            self._is_off = True
            warn_user(f"nanwatch compares replicas no more: {spell(error)}", may_raise=False)

    def _check(self) -> None:
        is_job = torch.distributed.is_available() and torch.distributed.is_initialized()
        weights = self._replicas.weights() if is_job else {}
        if not weights:
            why = "neither DistributedDataParallel nor a replicated DTensor says which ranks hold the same"
            if not is_job:
                why = "torch.distributed is not initialized in this process"
            elif rank_and_world_size()[1] == 1:
                why = "this job has one rank"
            if not self._has_warned:
                warn_user(f"nanwatch compares no replicas so far, as {why}", may_raise=False)
            self._has_warned = True
            return
        if self._comparison is None or (self._comparison.is_over and self._comparison.error is None):
            self._comparison = Exchange("replicas", judge, self._timeout)
        number = self._step // self._every
        for ranks, named in weights.items():
            self._comparison.post(ranks, number, fingerprints(named), {})
        if self._comparison.error is not None:
            raise self._comparison.error

    def _tell_all(self, verdicts: list[tuple[int, Ranks, Verdict]]) -> None:
        for number, ranks, verdict in verdicts:
            if not verdict["names"]:
                continue
            difference = ReplicaDifference(
                step=number * self._every,
                equal_at=(number - 1) * self._every,
                tensors=tuple(verdict["names"][:_MOST_NAMES]),
                num_tensors=len(verdict["names"]),
                ranks=tuple(verdict["ranks"]),
                hosts=tuple(verdict["hosts"]),
                size=len(ranks),
                batch=self._batch,
                **{name: verdict[name] for name in ("num_odd", "num_ranks", "is_majority")},
            )
            self.differences.append(difference)
            self._tell(difference)

    def remove(self) -> None:
        """End the comparison. Waits for the other ranks' last check, at most 2 s while nothing differs."""
        self._hooks.remove()
        self.batch_started(self._batch)
        with self._ending_by_an_error():
            if self._comparison is not None and not self._is_off:
                self._tell_all(self._comparison.end())
        self._is_off = True


# The comparison of steps.

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
        self._prints: dict[str, WeightPrint] = {}  # of each weight's latest check: optimizers step in turn
        self._faults: list[tuple[str, str, int, int]] = []

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
        for ranks, group in groups.items():
            before = {x.name: self._prints[x.name] for x in group if x.name in self._prints}
            values = {"step ": step} | {weight.name: self._print(weight) for weight in group}
            self._comparison.post(ranks, self._number, values, {**known, "before": before})

    def _print(self, weight: StepWeight) -> int:
        with torch.no_grad(), only_our_dispatch():
            now = _hash(weight.values, weight.tensor.shape)
            sketch = sketch_of(weight.values[:0] if weight.gradient is None else weight.gradient)
        known = self._prints.get(weight.name)
        self._prints[weight.name] = WeightPrint(now, known is not None and known.hash != now, sketch)
        return now

    def _take(self, verdicts: Iterable[tuple[int, Ranks, Verdict]]) -> None:
        for number, _, verdict in verdicts:
            self._num_differences += 1
            self._is_over = self._is_over or verdict["is_over"]
            faults = [] if self._is_over else verdict["faults"]
            step = self._steps.get(number - 1, 0)
            self._faults += [(kind, name, step, rank) for kind, name, rank in faults]

    def faults(self) -> list[tuple[str, str, int, int]]:
        """Return the faults that became certain since the last call: kind, weight, step, and a rank or -1."""
        if self._comparison is not None and not self._is_over:
            self._take(self._comparison.look())
        faults, self._faults = self._faults, []
        return faults

    def remove(self) -> None:
        """End the comparison. Waits for the other ranks' last check, at most 2 s while nothing differs."""
        if self._comparison is not None and not self._is_over:
            self._take(self._comparison.end())
        self._is_over = True
