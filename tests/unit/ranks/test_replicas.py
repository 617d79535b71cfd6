"""Who holds the same: from process groups, meshes and placements."""

import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from nanwatch.ranks.replicas import Replicas, ReplicaWatch
from nanwatch.report.events import ReplicaDifference


@pytest.fixture
def rank_two_of_four() -> Iterator[None]:
    """A job whose other ranks are made up: nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def ranks_of(model: nn.Module) -> dict[str, list[tuple[int, ...]]]:
    ranks: dict[str, list[tuple[int, ...]]] = {}
    for held_by, weights in Replicas(model).weights().items():
        for name in weights:
            ranks.setdefault(name, []).append(held_by)
    return ranks


@pytest.mark.parametrize("is_inner", [False, True])
def test_ddp_holds_weights_alike(rank_two_of_four: None, is_inner: bool) -> None:
    """Also when the module inside is watched, and only what DistributedDataParallel takes care of."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_parameter("own", nn.Parameter(torch.ones(2)))
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own"])
    parallel = nn.parallel.DistributedDataParallel(model)
    names = ("0.weight", "0.bias", "1.weight", "1.bias")
    assert ranks_of(model if is_inner else parallel) == {name: [(0, 1, 2, 3)] for name in names}


def test_placements_say_who_holds_the_same_shard(rank_two_of_four: None) -> None:
    """Rank 2 is at [1, 0] of the mesh: it shares a replicated part, and its shard with rank 0."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Module()
    places = {
        "hybrid": ([Replicate(), Shard(0)], [(0, 2)]),
        "other": ([Shard(0), Replicate()], [(2, 3)]),
        "everywhere": ([Replicate(), Replicate()], [(0, 1, 2, 3)]),
        "nowhere": ([Shard(0), Shard(0)], None),
    }
    for name, (placements, _) in places.items():
        model.register_parameter(name, nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, placements)))
    sums = torch.distributed.tensor.DTensor.from_local(torch.ones(2), mesh, [Replicate(), Partial()])
    model.register_parameter("sums", nn.Parameter(sums))
    assert ranks_of(model) == {name: ranks for name, (_, ranks) in places.items() if ranks}


@pytest.mark.parametrize("reason", ["torch.distributed is not initialized", "this job has one rank"])
def test_a_watch_without_other_ranks_says_so_once_and_lets_go(reason, recwarn, request):
    if "one rank" in reason:
        request.getfixturevalue("one_process_mesh")
    model = torch.nn.Linear(2, 2)
    told: list[ReplicaDifference] = []
    watch = ReplicaWatch(model, 1, 5.0, told.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(3):
        watch.batch_started(batch)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    watch.remove()
    (warned,) = recwarn
    assert f"compares no replicas so far, as {reason}" in str(warned.message)
    assert told == []
    gone = weakref.ref(model)
    del model, optimizer
    assert gone() is None
