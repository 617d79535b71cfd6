"""Who holds the same: the tensors of a model and of its optimizers that other ranks hold too, and their fingerprints.

A DTensor says by its mesh and its placements which ranks hold the same shard. A plain tensor is held by all ranks of
the process group of the DistributedDataParallel around it. Every other tensor is taken for this rank's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from ..instrumentation.wrapped_names import named_modules, parameter_names
from ..numerics import _extension
from ..numerics._fingerprint import fingerprint
from ..numerics.readable import Numbers, local_shard, only_our_dispatch, unreadable
from ..recording.optimizer_state import state_tensors

Ranks: TypeAlias = tuple[int, ...]
Kind: TypeAlias = Literal["weight", "buffer", "state"]
# They may differ between ranks until DistributedDataParallel broadcasts them at the next forward. PyTorch does not
# raise their versions.
_OF_BATCHES = ("running_mean", "running_var", "num_batches_tracked")


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
        found: list[Held] = []
        seen: set[int] = set()

        def add(name: str, kind: Kind, x: Tensor, owner: Tensor) -> None:
            for ranks in dict.fromkeys((_mesh_ranks(x), groups.get(id(owner), ()))):
                local = local_shard(x)
                if len(ranks) > 1 and not unreadable(x):
                    found.append(Held(name, kind, x if local is None else local, ranks))

        for one in named_modules(model):
            tensors: list[tuple[Kind, str, Tensor | None]] = [
                *(("weight", key, x) for key, x in list(one.module._parameters.items())),
                *(("buffer", key, x) for key, x in list(one.module._buffers.items())),
            ]
            for kind, key, x in tensors:
                if x is None or id(x) in seen or (kind == "buffer" and _is_of_batches(one.module, key)):
                    continue
                seen.add(id(x))
                add(f"{one.name}.{key}" if one.name else key, kind, x, x)
        names = parameter_names(model)
        everywhere = [*dict.fromkeys(groups.values())]
        for optimizer in _replicated(optimizers):
            for state in state_tensors(optimizer, names):
                if id(state.parameter) not in names and len(everywhere) == 1:
                    groups.setdefault(id(state.parameter), everywhere[0])  # a float32 copy of a weight
                of = _mesh_ranks(state.parameter)
                if of and not _mesh_ranks(state.tensor):  # a plain count of steps beside a shard
                    groups.setdefault(id(state.parameter), of)
                add(state.label, "state", state.tensor, state.parameter)
        return found

    def _wrappers(self) -> Iterator[DistributedDataParallel]:
        if self._parallel is None:
            self._parallel = [weakref.ref(one) for one in _extension.instances_of(DistributedDataParallel)]
        yield from (one for reference in self._parallel if (one := reference()) is not None)

    def are_local_steps(self) -> bool:
        """Return whether ranks step by themselves for a while, as local SGD does, and average weights later."""
        return any(
            not one.require_backward_grad_sync
            or any("local" in getattr(hook, "__name__", "").lower() for hook, _ in one._comm_hooks)
            for one in self._wrappers()
        )

    def _plain_groups(self, model: nn.Module) -> dict[int, Ranks]:
        """Return the ranks that hold a plain tensor alike, by its id."""
        found: dict[int, Ranks] = {}
        for parallel in self._wrappers():
            ranks = tuple(torch.distributed.get_process_group_ranks(parallel.process_group))
            for name, x in (*parallel.module.named_parameters(), *parallel.module.named_buffers()):
                if name not in parallel.parameters_to_ignore:
                    found[id(x)] = ranks
        return found


def _is_of_batches(module: nn.Module, key: str) -> bool:
    return key in _OF_BATCHES and isinstance(module, nn.modules.batchnorm._NormBase)


def _replicated(optimizers: Iterable[Optimizer]) -> Iterator[Optimizer]:
    """Yield the optimizers without those of ZeRO-1, where each rank holds the state of its part of the weights."""
    several = list(optimizers)
    # Not imported: where nobody did, there is none.
    sharded = [
        one
        for one in several
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(one).__mro__)
    ]
    inner = {id(getattr(one, "optim", None)) for one in sharded}
    yield from (one for one in several if one not in sharded and id(one) not in inner)


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


class Print(NamedTuple):
    """Fingerprint of a tensor. A buffer `is_kept` since the last check, and `writes` counts what wrote it since."""

    kind: Kind
    value: int
    is_kept: bool = True
    writes: int = 0


class Fingerprints:
    """Fingerprints of tensors, taken now; those of a GPU come later, and nobody waits for them but `read`."""

    def __init__(self, tensors: Sequence[Held]) -> None:
        self._held = [(one.name, one.kind, one.ranks) for one in tensors]
        self.versions = {
            one.name: 0 if one.tensor.is_inference() else one.tensor._version
            for one in tensors
            if one.kind == "buffer"
        }
        by_device: dict[torch.device, list[int]] = {}
        values: dict[int, Tensor] = {}
        with torch.no_grad(), only_our_dispatch():
            for at, one in enumerate(tensors):
                values[at] = fingerprint(one.tensor.detach())
                by_device.setdefault(one.tensor.device, []).append(at)
            self._parts = [
                (ats, Numbers(torch.stack([values[at] for at in ats]))) for ats in by_device.values()
            ]

    def read(self, before: Fingerprints | None, last: dict[str, int]) -> dict[Ranks, dict[str, Print]]:
        """Return the fingerprint of each tensor by its ranks and its name.

        `before` are the fingerprints of the check before, and `last` has the values that its buffers had. It then has
        those of this check.
        """
        values: dict[int, int] = {}
        for ats, numbers in self._parts:
            values.update(zip(ats, (int(one) % 2**64 for one in numbers.tensor().tolist()), strict=True))
        found: dict[Ranks, dict[str, Print]] = {}
        present: dict[str, int] = {}
        for at, (name, kind, ranks) in enumerate(self._held):
            one = Print(kind, values[at])
            if kind == "buffer":
                written = self.versions[name] - (0 if before is None else before.versions.get(name, 0))
                one = Print(kind, values[at], last.get(name) == values[at], written)
                present[name] = values[at]
            found.setdefault(ranks, {})[name] = one
        last.clear()
        last.update(present)
        return found
