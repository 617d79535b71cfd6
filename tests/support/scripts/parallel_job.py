"""One rank of a job in which many kinds of parallel training run one after the other, each unwatched and watched.

RANK=0 WORLD_SIZE=2 python parallel_job.py STORE SCENARIO...
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import nanwatch
from nanwatch.report.report import Report
from support import watching
from support.parallel_models import NAMES, Net, WithStatistics, mesh_of, shard, split
from support.training import assert_same_bits


def sequence_numbers() -> list[int]:
    """Return how many collectives each group has issued, those of the reducer in C++ among them."""
    return [group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map]


Parallelize = Callable[[nn.Module], nn.Module]


def data(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 8, generator=generator)


def start_watch(model: nn.Module, **options: Any) -> nanwatch.Watch:
    return watching.watch(model, max_frames=10_000, on_nonfinite="record", verify_hits=True, **options)


def local(x: Any) -> Tensor:
    return (x.to_local() if hasattr(x, "to_local") else x).detach().clone()


class Trained(NamedTuple):
    """The weights and buffers at the end, what was sent, and the watch, if there was one.

    `events` are the profiler's, which names collectives, and the sends and receives between two ranks.
    """

    weights: dict[str, Tensor]
    collectives: list[int]
    events: Counter[str]
    watch: nanwatch.Watch | None


def train(model: nn.Module, step: Callable[[int], object], watch: nanwatch.Watch | None) -> Trained:
    """Three steps, of which `step` makes the forward and the backward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    before = sequence_numbers()
    with torch.profiler.profile() as profile:
        for number in range(3):
            step(number)
            optimizer.step()
            optimizer.zero_grad()
    collectives = [now - then for now, then in zip(sequence_numbers(), before, strict=True)]
    events = Counter(e.name for e in profile.events() if e.name.startswith(("gloo:", "c10d::")))
    if watch is not None:
        watch.stop()
    kept = {name: local(x) for name, x in (*model.named_parameters(), *model.named_buffers())}
    return Trained(kept, collectives, events, watch)


def check(
    plain: Trained,
    watched: Trained,
    *,
    batches: int,
    names: list[str],
    has_gradients: bool,
    mesh: list[str] | None = None,
) -> None:
    """Hold a watched training against the unwatched one: the same bits and traffic, and the user's names."""
    watch = watched.watch
    report = watch.report()
    assert_same_bits(plain.weights, watched.weights)
    assert (watched.collectives, watched.events) == (plain.collectives, plain.events)
    assert watch.batch == batches - 1
    assert watch.counters.get("stale_hits", 0) == 0
    assert report.finding is None
    assert all(record.isfinite for f in report.frames for record in f.records if record.role == "output")
    assert sorted({frame.name for frame in report.frames}) == names
    backward_names = {frame.name for frame in report.frames if frame.phase == "backward"}
    assert sorted(backward_names) == (names if has_gradients else [])
    assert mesh is None or list(report.parameter_mesh) == mesh
    assert Report.from_json(report.to_json()) == report


def compare(
    build: Callable[[], nn.Module],
    parallelize: Parallelize,
    mesh: list[str],
    give: Callable[[int], Tensor] = data,
    names: list[str] = NAMES,
) -> None:
    """Watch before and after the model is made parallel, with gradients and without. With them replicas are compared.

    The names are the user's, whatever was put around or into the model. `mesh` is the place of this rank.
    """

    def run(when: str, **options: Any) -> Trained:
        torch.manual_seed(0)
        model = build()
        watch = start_watch(model, **options) if when == "before" else None
        model = parallelize(model)
        if when == "after":
            watch = start_watch(model, **options)
        return train(model, lambda number: model(give(number)).square().sum().backward(), watch)

    plain = run("never")
    assert sum(plain.collectives) > 0  # or the counting would see nothing
    assert sum(plain.events.values()) > 0
    for when, gradients in product(("before", "after"), (False, True)):
        watched = run(when, gradients=gradients, replicas=gradients)
        check(plain, watched, batches=3, names=names, has_gradients=gradients, mesh=mesh)


SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def ddp() -> None:
    """It has no mesh of its own."""
    names = sorted([*(f"net.{part}" if part else "net" for part in NAMES), "norm", ""])
    compare(WithStatistics, DistributedDataParallel, [], names=names)


@scenario
def fsdp2_written() -> None:
    """The weights of a sharded model are written between two forwards, in place and from a checkpoint.

    FSDP gathers into the same storage past the version counter: the next batch reads what is there.
    """
    torch.manual_seed(0)
    net = Net()
    model = shard(net, net.blocks, mesh_of("dp"))
    with start_watch(model) as watch, torch.no_grad():
        model(data(0))
        for factor in (2.0, 4.0):
            model.reshard()
            if factor == 2.0:
                for x in model.parameters():
                    x.to_local().mul_(2.0)
            else:
                options = StateDictOptions(full_state_dict=True)
                whole = {name: 2.0 * x for name, x in get_model_state_dict(model, options=options).items()}
                set_model_state_dict(model, whole, options=options)
            model(data(0))
        for name in ("blocks.0.up", "head"):
            records = [record for frame in watch.frames if frame.name == name for record in frame.records]
            first, second, third = (record.abs_max for record in records if record.label == "weight")
            assert (second, third) == (2 * first, 4 * first)
    assert watch.counters["stale_hits"] == 0


@scenario
def both() -> None:
    """Sharded over one dimension of a mesh and tensor parallel over the other."""

    def parallelize(model: nn.Module) -> nn.Module:
        mesh = mesh_of("dp", "tp")
        split(model.blocks, mesh["tp"])
        return shard(model, model.blocks, mesh["dp"])

    def give(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank() // 2)
        return torch.randn(4, 8, generator=generator)

    compare(Net, parallelize, [f"dp={dist.get_rank() // 2} of 2", f"tp={dist.get_rank() % 2} of 2"], give)


@scenario
def pipeline() -> None:
    """Each rank has the frames of its own stage, watched before it is made a stage and after.

    The call on memory that was never written, here filled with nan, by which a stage learns its shapes is no batch.
    """
    number = dist.get_rank()

    def run(when: str, **options: Any) -> Trained:
        torch.manual_seed(0)
        net = Net()
        part = nn.Sequential(net.blocks[0]) if number == 0 else nn.Sequential(net.blocks[1], net.head)
        watch = start_watch(part, **options) if when == "before" else None
        stage = PipelineStage(part, number, 2, torch.device("cpu"))
        schedule = Schedule1F1B(
            stage, n_microbatches=2, loss_fn=lambda y, target: (y - target).square().sum()
        )
        if when == "after":
            watch = start_watch(part, **options)

        def step(batch: int) -> None:
            if number == 0:
                schedule.step(data(batch))
            else:
                schedule.step(target=torch.ones(4, 3))

        # Before the first batch the stage is called on memory that was never written.
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True)
        trained = train(part, step, watch)
        torch.use_deterministic_algorithms(False)
        return trained

    plain = run("never")
    assert plain.events["gloo:send"] == plain.events["gloo:recv"] > 0
    names = ["", "0", "0.down", "0.norm", "0.up"] + ["1"] * number
    for when, gradients in product(("before", "after"), (False, True)):
        watched = run(when, gradients=gradients)
        # two microbatches a step
        check(plain, watched, batches=6, names=names, has_gradients=gradients)


class Layers(nn.Module):
    """Two layers, and one that no call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def shared(way: str) -> nn.Module:
    torch.manual_seed(0)
    net = Layers()
    if way in ("fsdp2", "one shard"):
        return shard(net, (), mesh_of("dp"))
    if way != "unused":
        net.unused = nn.Identity()
    model = DistributedDataParallel(net, find_unused_parameters=way == "unused", static_graph=way == "static")
    if way == "hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


def stopped_by(way: str) -> tuple[str, int]:
    """Return the error of the third step, in which rank 1 has a bad gradient, and the rank that it names."""
    model, is_one_shard = shared(way), way == "one shard"
    if way == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(mask: Tensor) -> None:
        ((model(torch.randn(3, 4)).square().mean(-1) * mask).sum() / mask.sum()).backward()

    with nanwatch.watch(model, gradients=True, rerun=False):
        for step in range(3):
            is_bad = step == 2 and dist.get_rank() == 1
            optimizer.zero_grad()
            with model.no_sync() if way == "no_sync" else nullcontext():
                backward(torch.full((3,), float(not is_bad or is_one_shard)))
            if way == "no_sync":
                backward(torch.ones(3))
            if is_one_shard and is_bad:
                next(model.parameters()).grad.to_local()[0, 0] = torch.inf
            before = [local(x) for x in model.parameters()]
            try:
                optimizer.step()
            except nanwatch.NonFiniteError as error:
                assert step == 2
                assert_same_bits(before, [local(x) for x in model.parameters()])
                return type(error).__name__, error.origin.rank
    return "no error", -1


@scenario
def steps() -> None:
    """No rank takes a step in which another has made a gradient non-finite, and each names that rank.

    DistributedDataParallel in its forms, ZeRO-1 and FSDP2 give each rank the nan. Only one shard's inf has to be told.
    """
    for way in ("plain", "unused", "static", "hook", "no_sync", "zero", "fsdp2", "one shard"):
        is_told = way == "one shard" and dist.get_rank() == 0
        assert stopped_by(way) == ("PeerNonFiniteError" if is_told else "NonFiniteError", 1), way


def main() -> None:
    warnings.simplefilter("ignore")
    path, *wanted = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)
    for name in wanted:
        SCENARIOS[name]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
