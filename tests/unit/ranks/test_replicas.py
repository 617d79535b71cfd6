"""Who holds the same, from process groups, meshes and placements, and the judgement of steps over ranks."""

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from nanwatch.ranks.exchange import Side
from nanwatch.ranks.replicas import Replicas, ReplicaWatch, WeightPrint, judge_steps, sketch_of


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
    steps = itertools.count()
    watch = ReplicaWatch(model, lambda: next(steps), 1, 5.0, pytest.fail)
    for batch in range(3):
        watch.batch_started(batch)
    watch.remove()
    (warned,) = recwarn
    assert f"compares no replicas so far, as {reason}" in str(warned.message)
    gone = weakref.ref(model)
    del model
    assert gone() is None


GRADIENT = torch.randn(24, generator=torch.Generator().manual_seed(3))


def side(
    rank: int, now: int, gradient: Tensor = GRADIENT, before: int = 1, step: int = 2, **more: Any
) -> Side:
    """One rank whose weight w has a hash, and had another one before it stepped with a gradient."""
    known = {"step": 1, "forwards": 1, "declared": ["w"], "matrices": ["w"], "directed": ["w"]}
    known |= {"are_groups_small": False, "is_mixed": False}
    prints = {"w": WeightPrint(before, False, sketch_of(gradient))}
    return Side(1, [(rank, "host")], {"step ": step, "w": now}, known | {"before": prints} | more)


@pytest.mark.parametrize(
    ("gradient", "fault"),
    [
        (GRADIENT, None),
        (GRADIENT * 1.001, None),
        (GRADIENT + 0.005 * GRADIENT.flip(0), None),
        (GRADIENT * 2, ("clipping:one-rank", "w", 1, -1)),
        (GRADIENT.flip(0), ("not-reduced", "w", 1, -1)),
        (-GRADIENT, ("not-reduced", "w", 1, -1)),
        (GRADIENT * 0, ("rank-lost", "w", 1, 2)),
        (GRADIENT[:0], ("rank-lost", "w", 1, 2)),
        (GRADIENT * torch.nan, None),
    ],
)
def test_unequal_gradients_before_a_weight_parted_are_told_apart(gradient: Tensor, fault: object) -> None:
    """By zero, by norm and by direction. What kernels round otherwise is equal."""
    verdict = judge_steps([side(0, 5), side(1, 5), side(2, 6, gradient)])
    assert verdict == {"names": ["w"], "faults": [] if fault is None else [fault], "is_over": False}


def test_ranks_that_count_their_steps_differently_are_not_compared() -> None:
    """By their numbers, or as one has a weight that it moved to what another had a step before."""
    assert judge_steps([side(0, 5), side(1, 5, step=3)])["is_over"]
    assert judge_steps([side(0, 5, before=1), side(1, 1, before=0)])["is_over"]
    assert not judge_steps([side(0, 5, before=1), side(1, 1, before=1)])["is_over"]
    # A rank that left out a step, or made a forward of its own, is not compared in this check.
    verdict = judge_steps([side(0, 5), side(1, 6, GRADIENT.flip(0), forwards=2)])
    assert verdict == {"names": [], "faults": [], "is_over": False}


def test_a_weight_of_which_nobody_says_who_holds_it_needs_evidence() -> None:
    """Shards and experts that begin alike part without a fault; groups of fewer ranks and a step alike are evidence."""

    def faults(name: str = "w", *kept: str, has_moved: bool = False, **more: Any) -> int:
        sides = []
        for rank, gradient in enumerate((GRADIENT, -GRADIENT)):
            prints = dict.fromkeys((name, *kept), WeightPrint(1, has_moved, sketch_of(gradient)))
            known = side(rank, 0, declared=[], matrices=kept, **more).more | {"before": prints}
            values = {"step ": 2, name: rank + 5} | dict.fromkeys(kept, 9)
            sides.append(Side(1, [(rank, "host")], values, known))
        return len(judge_steps(sides)["faults"])

    assert (faults(), faults(are_groups_small=True), faults(has_moved=True)) == (0, 1, 1)
    # A norm beside matrices that stay equal, but not the bias of one.
    assert (faults("norm.weight", "up.weight"), faults("up.bias", "up.weight")) == (1, 0)
