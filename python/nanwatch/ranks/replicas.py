"""Replicas: the weights that other ranks hold too, and their comparison while a run goes on.

A DTensor says by its mesh and its placements which ranks hold the same shard. A plain tensor is held by all ranks of
the process group of the DistributedDataParallel around it. Every other tensor is taken for this rank's own. States of
optimizers are not compared: one that parted shows in the weights after its next step.

A check takes the fingerprints when a batch begins that follows a step of the optimizer: no weight is half written then.
The first batches after it ask whether another rank had other fingerprints.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import Handles, after_steps
from ..instrumentation.wrapped_names import named_modules
from ..numerics import _extension
from ..numerics._fingerprint import fingerprint
from ..numerics.readable import local_shard, only_our_dispatch, unreadable
from ..report.events import ReplicaDifference
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
        reference = weakref.ref(self)

        def after(optimizer: Optimizer, *_: Any) -> None:
            if (watch := reference()) is not None and not watch._has_stepped:
                watch._stepped(optimizer)

        self._hooks = Handles(self, [after_steps.add(after)])

    def _stepped(self, optimizer: Optimizer) -> None:
        if optimizer not in self._optimizers:
            model = self._model()
            parameters = {id(x) for group in optimizer.param_groups for x in group["params"]}
            is_models = model is not None and any(id(x) in parameters for x in each_parameter(model))
            self._optimizers[optimizer] = is_models
        self._has_stepped = self._optimizers[optimizer]

    def batch_started(self, batch: int, module: nn.Module | None = None, args: tuple[Any, ...] = ()) -> None:
        """Take the fingerprints, if a check is due, and tell of differences. Never raises."""
        if self._is_off or not self._has_stepped or os.getpid() != self._pid or _is_captured():
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
            why = "torch.distributed is not initialized in this process"
            if is_job:
                why = (
                    "neither DistributedDataParallel nor a replicated DTensor says which ranks hold the same"
                )
            if not self._has_warned:
                self._has_warned = True
                warn_user(f"nanwatch compares no replicas so far, as {why}", may_raise=False)
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


def _is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
