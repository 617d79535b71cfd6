"""Who holds the same: the tensors of a model and of its optimizers that other ranks hold too, and their fingerprints.

A DTensor says by its mesh and its placements which ranks hold the same shard. A plain tensor is held by all ranks of
the process group of the DistributedDataParallel around it. Every other tensor is taken for this rank's own.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from ..instrumentation.wrapped_names import named_modules, parameter_names
from ..numerics import _extension
from ..numerics._fingerprint import fingerprint
from ..numerics.readable import local_shard, only_our_dispatch, unreadable
from ..recording.optimizer_state import state_tensors
from .exchange import MOST_RANKS, Ranks, Side

Kind: TypeAlias = Literal["weight", "buffer", "state"]
# They may differ between ranks until DistributedDataParallel broadcasts them at the next forward. PyTorch does not
# raise their versions.
_OF_BATCHES = ("running_mean", "running_var", "num_batches_tracked")
# What happened to a buffer since the check before.
_STAYED, _CHANGED, _WRITTEN = 0, 1, 2


class Held(NamedTuple):
    """Tensor that the ranks `ranks` hold alike, and this rank's part of it."""

    name: str
    kind: Kind
    tensor: Tensor
    ranks: Ranks


class Replicas:
    """The replicated tensors of one model. Keeps none of them alive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._parallel: list[weakref.ref[DistributedDataParallel]] | None = None

    def held(self, optimizers: Iterable[Optimizer] = ()) -> list[Held]:
        """Return the weights, buffers and states of these optimizers that other ranks hold too, in a fixed order."""
        model = self._model()
        if model is None:
            return []
        groups = self._plain_groups(model)
        replicated: list[Held] = []
        seen: set[int] = set()

        def add(name: str, kind: Kind, x: Tensor, owner: Tensor) -> None:
            for ranks in dict.fromkeys((_mesh_ranks(x), groups.get(id(owner), ()))):
                local = local_shard(x)
                if len(ranks) > 1 and not unreadable(x):
                    replicated.append(Held(name, kind, x if local is None else local, ranks))

        for named in named_modules(model):
            tensors: list[tuple[Kind, str, Tensor | None]] = [
                *(("weight", key, x) for key, x in list(named.module._parameters.items())),
                *(("buffer", key, x) for key, x in list(named.module._buffers.items())),
            ]
            for kind, key, x in tensors:
                if x is None or id(x) in seen or (kind == "buffer" and _is_of_batches(named.module, key)):
                    continue
                seen.add(id(x))
                add(f"{named.name}.{key}" if named.name else key, kind, x, x)
        names = parameter_names(model)
        everywhere = [*dict.fromkeys(groups.values())]
        for optimizer in _replicated(optimizers):
            for state in state_tensors(optimizer, names):
                if id(state.parameter) not in names and len(everywhere) == 1:
                    groups.setdefault(id(state.parameter), everywhere[0])  # a float32 copy of a weight
                owners = _mesh_ranks(state.parameter)
                if owners and not _mesh_ranks(state.tensor):  # a plain count of steps beside a shard
                    groups.setdefault(id(state.parameter), owners)
                add(state.label, "state", state.tensor, state.parameter)
        return replicated

    def _wrappers(self) -> Iterator[DistributedDataParallel]:
        if self._parallel is None:
            self._parallel = [
                weakref.ref(wrapper) for wrapper in _extension.instances_of(DistributedDataParallel)
            ]
        yield from (wrapper for reference in self._parallel if (wrapper := reference()) is not None)

    def are_local_steps(self) -> bool:
        """Return whether ranks step by themselves for a while, as local SGD does, and average weights later."""
        return any(
            not wrapper.require_backward_grad_sync
            or any("local" in getattr(hook, "__name__", "").lower() for hook, _ in wrapper._comm_hooks)
            for wrapper in self._wrappers()
        )

    def _plain_groups(self, model: nn.Module) -> dict[int, Ranks]:
        """Return the ranks that hold a plain tensor alike, by its id."""
        groups: dict[int, Ranks] = {}
        for parallel in self._wrappers():
            ranks = tuple(torch.distributed.get_process_group_ranks(parallel.process_group))
            for name, x in (*parallel.module.named_parameters(), *parallel.module.named_buffers()):
                if name not in parallel.parameters_to_ignore:
                    groups[id(x)] = ranks
        return groups


def _is_of_batches(module: nn.Module, key: str) -> bool:
    return key in _OF_BATCHES and isinstance(module, nn.modules.batchnorm._NormBase)


def _replicated(optimizers: Iterable[Optimizer]) -> Iterator[Optimizer]:
    """Yield the optimizers without those of ZeRO-1, where each rank holds the state of its part of the weights."""
    several = list(optimizers)
    # Not imported: where nobody did, there is none.
    sharded = [
        optimizer
        for optimizer in several
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
    ]
    inner = {id(getattr(optimizer, "optim", None)) for optimizer in sharded}
    yield from (each for each in several if each not in sharded and id(each) not in inner)


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


class Fingerprints:
    """Fingerprints of tensors at one check, by their ranks and names. Waits for a GPU.

    A weight and a state are compared by their bits. A buffer may be a rank's own, so it is compared by whether it
    stayed, changed by itself, or was written as far as PyTorch knows.
    """

    def __init__(self, tensors: list[Held], before: Fingerprints | None) -> None:
        self.values: dict[Ranks, dict[str, int]] = {}
        self.buffers = [held.name for held in tensors if held.kind == "buffer"]
        self._known: dict[tuple[str, Ranks], tuple[int, int]] = {}
        bits = [0] * len(tensors)
        by_device: dict[torch.device, list[int]] = {}
        with torch.no_grad(), only_our_dispatch():
            prints = [fingerprint(held.tensor.detach()) for held in tensors]
            for at, held in enumerate(tensors):
                by_device.setdefault(held.tensor.device, []).append(at)
            for places in by_device.values():
                for at, value in zip(
                    places, torch.stack([prints[at] for at in places]).tolist(), strict=True
                ):
                    bits[at] = int(value) % 2**64
        for held, value in zip(tensors, bits, strict=True):
            compared = value
            if held.kind == "buffer":
                key = held.name, held.ranks
                version = 0 if held.tensor.is_inference() else held.tensor._version
                old = (value, version) if before is None else before._known.get(key, (value, version))
                compared = _WRITTEN if old[1] != version else _CHANGED if old[0] != value else _STAYED
                self._known[key] = value, version
            self.values.setdefault(held.ranks, {})[held.name] = compared


def judge(sides: list[Side]) -> dict[str, Any]:
    """Return the names that differ, those to tell of, and the ranks that are odd by majority at the first of them.

    A buffer is told of only where it stayed on some ranks, and changed on the others without a write.
    """
    total = sum(side.num_ranks for side in sides)
    common = [name for name in (sides[0].values if sides else ()) if all(name in s.values for s in sides)]
    differing = {name: values for name in common if len(values := {s.values[name] for s in sides}) > 1}
    buffers = {name for side in sides for name in side.more["buffers"]}
    to_tell = [
        name for name, values in differing.items() if name not in buffers or values == {_STAYED, _CHANGED}
    ]
    if not to_tell:
        return {"names": [*differing], "told": []}
    counts = Counter[int]()
    for side in sides:
        counts[side.values[to_tell[0]]] += side.num_ranks
    value, most = counts.most_common(1)[0]
    value = _STAYED if to_tell[0] in buffers else value
    is_majority = 2 * most > total or to_tell[0] in buffers
    odd = [side for side in sides if side.values[to_tell[0]] != value] if is_majority else sides
    ranks = sorted(rank for side in odd for rank in side.ranks)[:MOST_RANKS]
    return {
        "names": [*differing],
        "told": to_tell,
        "ranks": [rank for rank, _ in ranks],
        "hosts": [host for _, host in ranks],
        "num_odd": sum(side.num_ranks for side in odd),
        "num_ranks": total,
        "is_majority": is_majority,
    }
