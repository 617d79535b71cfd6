"""One rank of a job in which many kinds of parallel training run one after the other, each unwatched and watched.

RANK=0 WORLD_SIZE=2 python parallel_job.py STORE SCENARIO...
"""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint import state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import nanwatch
from nanwatch.report.report import Report
from support import watching
from support.parallel_models import NAMES, Net, WithStatistics, mesh_of, shard, split
from support.training import assert_same_bits

# Trains for a step: makes its forward and its backward.
Step = Callable[[int], object]
# The module that a user watches, and a function that makes it parallel and returns what has the weights then.
Training = tuple[nn.Module, Callable[[], tuple[nn.Module, Step]]]


def data(step: int, stream: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + stream)
    return torch.randn(4, 8, generator=generator)


def start_watch(model: nn.Module, **options: Any) -> nanwatch.Watch:
    return watching.watch(model, max_frames=10_000, on_nonfinite="record", verify_hits=True, **options)


def local(x: Any) -> Tensor:
    return (x.to_local() if hasattr(x, "to_local") else x).detach().clone()


def compare(
    make: Callable[[], Training], names: list[str], *, batches: int = 3, mesh: list[str] | None = None
) -> None:
    """Hold watched trainings of three steps against an unwatched one: the same bits and traffic, and the user's names.

    The watch begins before and after the model is made parallel, with gradients and without. With them replicas are
    compared, where there is a `mesh`: the place of this rank.
    """

    def train(when: str, **options: Any) -> tuple[dict[str, Tensor], Counter[str], Any]:
        """Return the weights and buffers, what was sent, and the watch. The profiler names collectives, and sends."""
        torch.manual_seed(0)
        module, distribute = make()
        watch = start_watch(module, **options) if when == "before" else None
        model, step = distribute()
        if when == "after":
            watch = start_watch(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        with torch.profiler.profile() as profile:
            for number in range(3):
                step(number)
                optimizer.step()
                optimizer.zero_grad()
        sent = Counter(e.name for e in profile.events() if e.name.startswith(("gloo:", "c10d::")))
        if watch is not None:
            watch.stop()
        kept = {name: local(x) for name, x in (*model.named_parameters(), *model.named_buffers())}
        return kept, sent, watch

    expected, expected_sent, _ = train("never")
    assert expected_sent  # or the counting would see nothing
    for when, gradients in product(("before", "after"), (False, True)):
        replicas = {} if mesh is None else {"replicas": gradients}
        kept, sent, watch = train(when, gradients=gradients, **replicas)
        report = watch.report()
        assert_same_bits(expected, kept)
        assert sent == expected_sent
        assert watch.batch == batches - 1
        assert watch.counters.get("stale_hits", 0) == 0
        assert report.finding is None
        assert all(r.isfinite for frame in report.frames for r in frame.records if r.role == "output")
        assert sorted({frame.name for frame in report.frames}) == names
        backward_names = {frame.name for frame in report.frames if frame.phase == "backward"}
        assert sorted(backward_names) == (names if gradients else [])
        assert mesh is None or list(report.parameter_mesh) == mesh
        assert Report.from_json(report.to_json()) == report


def training_of(
    build: Callable[[], nn.Module], parallelize: Callable[[Any], nn.Module], stream: int
) -> Callable[[], Training]:
    """Return what makes a training whose ranks all call the model, each with the data of its stream."""

    def make() -> Training:
        module = build()

        def distribute() -> tuple[nn.Module, Step]:
            model = parallelize(module)
            return model, lambda number: model(data(number, stream)).square().sum().backward()

        return module, distribute

    return make


def ddp() -> None:
    """It has no mesh of its own."""
    names = sorted([*(f"net.{part}" if part else "net" for part in NAMES), "norm", ""])
    compare(training_of(WithStatistics, DistributedDataParallel, dist.get_rank()), names, mesh=[])


def fsdp2_written() -> None:
    """The weights of a sharded model are written between two forwards, in place and from a checkpoint.

    FSDP gathers into the same storage past the version counter: the next batch reads what is there.
    """
    torch.manual_seed(0)
    net, x = Net(), data(0, dist.get_rank())
    model = shard(net, net.blocks, mesh_of("dp"))
    with start_watch(model) as watch, torch.no_grad():
        model(x)
        for factor in (2.0, 4.0):
            model.reshard()
            if factor == 2.0:
                for weight in model.parameters():
                    weight.to_local().mul_(2.0)
            else:
                options = state_dict.StateDictOptions(full_state_dict=True)
                whole = state_dict.get_model_state_dict(model, options=options)
                twofold = {name: 2.0 * weight for name, weight in whole.items()}
                state_dict.set_model_state_dict(model, twofold, options=options)
            model(x)
        for name in ("blocks.0.up", "head"):
            records = [record for frame in watch.frames if frame.name == name for record in frame.records]
            first, second, third = (record.abs_max for record in records if record.label == "weight")
            assert (second, third) == (2 * first, 4 * first)
    assert watch.counters["stale_hits"] == 0


def both() -> None:
    """Sharded over one dimension of a mesh and tensor parallel over the other."""

    def parallelize(model: Any) -> nn.Module:
        mesh = mesh_of("dp", "tp")
        split(model.blocks, mesh["tp"])
        return shard(model, model.blocks, mesh["dp"])

    row, column = divmod(dist.get_rank(), 2)
    compare(training_of(Net, parallelize, row), NAMES, mesh=[f"dp={row} of 2", f"tp={column} of 2"])


def pipeline() -> None:
    """Each rank has the frames of its own stage, watched before it is made a stage and after.

    The call on memory that was never written, here filled with nan, by which a stage learns its shapes is no batch.
    """
    number = dist.get_rank()

    def make() -> Training:
        net = Net()
        part = nn.Sequential(net.blocks[0]) if number == 0 else nn.Sequential(net.blocks[1], net.head)

        def distribute() -> tuple[nn.Module, Step]:
            stage = PipelineStage(part, number, 2, torch.device("cpu"))
            schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, target: (y - target).square().sum())

            def step(batch: int) -> None:
                if number == 0:
                    schedule.step(data(batch, 0))
                else:
                    schedule.step(target=torch.ones(4, 3))

            return part, step

        return part, distribute

    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    names = ["", "0", "0.down", "0.norm", "0.up"] + ["1"] * number
    compare(make, names, batches=6)  # two microbatches a step
    torch.use_deterministic_algorithms(False)


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
    """Return the error of a step in which rank 1 has a bad gradient, and the rank that it names."""
    model, is_one_shard = shared(way), way == "one shard"
    failing = 0 if is_one_shard else 2  # also where no step before has shown that the model is sharded
    if way == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(mask: Tensor) -> None:
        ((model(torch.randn(3, 4)).square().mean(-1) * mask).sum() / mask.sum()).backward()

    with nanwatch.watch(model, gradients=True, rerun=False):
        for step in range(3):
            is_bad = step == failing and dist.get_rank() == 1
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
                assert step == failing
                assert_same_bits(before, [local(x) for x in model.parameters()])
                return type(error).__name__, error.origin.rank
    return "no error", -1


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
    for scenario in (ddp, fsdp2_written, both, pipeline, steps):
        if scenario.__name__ in wanted:
            scenario()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
