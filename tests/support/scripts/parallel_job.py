"""One rank of a job in which many kinds of parallel training run one after the other, each unwatched and watched.

`RANK=0 WORLD_SIZE=2 python parallel_job.py STORE SCENARIO...` prints a JSON object: what each scenario saw, or the
traceback that ended it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import nanwatch
from nanwatch.recording.shards import shard_note
from support import watching
from support.parallel_models import (
    Block,
    Net,
    WithStatistics,
    mesh_of,
    shard,
    shard_blocks,
    shard_each_layer,
    split,
)
from support.parallel_training import (
    Parallelize,
    Trained,
    compare,
    data,
    difference,
    local,
    same_data,
    start_watch,
    train,
)

INF = float("inf")
SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {}


def scenario(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    SCENARIOS[function.__name__] = function
    return function


# Data parallel


@scenario
def ddp() -> dict[str, Any]:
    return compare(WithStatistics, nn.parallel.DistributedDataParallel)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    return shard(model, model.blocks, mesh_of("dp"), **options)


@scenario
def fsdp2() -> dict[str, Any]:
    return compare(Net, sharded)


@scenario
def fsdp2_each_layer() -> dict[str, Any]:
    return compare(Net, lambda model: shard_each_layer(model, mesh_of("dp"), reshard_after_forward=True))


@scenario
def fsdp2_blocks() -> dict[str, Any]:
    """The blocks alone are sharded: the model itself and its head are on every rank."""
    return compare(Net, lambda model: shard_blocks(model, model.blocks, mesh_of("dp")))


@scenario
def fsdp2_mixed_precision() -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return compare(Net, lambda model: sharded(model, mp_policy=policy, reshard_after_forward=False))


@scenario
def fsdp2_checkpointed() -> dict[str, Any]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def parallelize(model: nn.Module) -> nn.Module:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        return sharded(model)

    return compare(Net, parallelize)


@scenario
def fsdp2_written() -> dict[str, Any]:
    """The weights of a sharded model written between two forwards, in place and from a checkpoint: seen at once."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    torch.manual_seed(0)
    model = sharded(Net())
    seen = []
    with (
        watching.watch(model, max_frames=1000, on_nonfinite="record", verify_hits=True) as watch,
        torch.no_grad(),
    ):
        model(data(0))
        for factor in (2.0, 4.0):
            model.reshard()
            if factor == 2.0:
                for x in model.parameters():
                    x.to_local().mul_(2.0)
            else:
                whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
                whole = {name: 2.0 * x for name, x in whole.items()}
                set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
            model(data(0))
        for name in ("blocks.0.up", "head"):
            seen.append(
                [r.abs_max for f in watch.frames if f.name == name for r in f.records if r.label == "weight"]
            )
    return {"seen": seen, "stale": watch.counters["stale_hits"], "hits": watch.counters["cache_hits"]}


@scenario
def fsdp2_bad_gradient() -> dict[str, Any]:
    """The gradient of one weight overflows on one rank, where nothing else does: no rank takes the step."""
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.head.weight.mul_(1e-25)
    shard_each_layer(model, mesh_of("dp"))
    is_guilty = dist.get_rank() == 1
    factor = 1.0
    model.head.register_forward_pre_hook(lambda _, args: (args[0].detach() * factor,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with watching.watch(model, gradients=True) as watch:
        for step in range(2):
            factor = 1e25 if step == 1 and is_guilty else 1.0
            (model(data(step)).sum() * (1e15 if step == 1 and is_guilty else 1.0)).backward()
            before = [local(x) for x in model.parameters()]
            try:
                optimizer.step()
                optimizer.zero_grad()
                seen.append("stepped")
            except nanwatch.NonFiniteError as error:
                finding = error.report.finding
                assert finding is not None
                unchanged = all(
                    torch.equal(a, local(b)) for a, b in zip(before, model.parameters(), strict=True)
                )
                seen.append([finding.module, finding.label, finding.phase, finding.batch, unchanged])
        labels = {
            r.label for f in watch.frames if f.phase == "backward" and f.name == "head" for r in f.records
        }
    return {"seen": seen, "labels": sorted(labels)}


@scenario
def strided() -> dict[str, Any]:
    """Weights that are tensor parallel first and sharded then: their blocks are where they are said to be."""
    mesh = mesh_of("dp", "tp")
    seen = {}
    for width in (8, 5):
        model = Net(width)
        split(model.blocks, mesh["tp"])
        shard_each_layer(model, mesh["dp"])
        for name, x in model.named_parameters():
            placement = shard_note(x).placement
            assert placement is not None
            whole, part = x.full_tensor(), x.to_local()
            start = placement.start
            here = (
                None
                if start is None
                else whole[tuple(slice(i, i + n) for i, n in zip(start, part.shape, strict=True))]
            )
            seen[f"{width} {name}"] = {
                "words": str(placement),
                "numel": part.numel(),
                "equal": here is not None and torch.equal(here, part),
            }
    return seen


@scenario
def fsdp1() -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    def parallelize(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )

    return compare(Net, parallelize)


@scenario
def fsdp1_bad_loss() -> dict[str, Any]:
    """The loss is nan on one rank: no rank takes the step, and each knows where it began."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    with watching.watch(model, gradients=True):
        for step in range(2):
            factor = float("nan") if step == 1 and dist.get_rank() == 1 else 1.0
            try:
                (model(data(step)).sum() * factor).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append("stepped")
            except nanwatch.NonFiniteError as error:
                seen.append(None if error.origin is None else error.origin.first.rank)
    seen.append(all(bool(torch.isfinite(x).all()) for x in model.parameters()))
    return {"seen": seen}


# Tensor parallel


@scenario
def tensor_parallel() -> dict[str, Any]:
    def parallelize(model: nn.Module) -> nn.Module:
        split(model.blocks, mesh_of("tp"))
        return model

    return compare(Net, parallelize, same_data)


@scenario
def sequence_parallel() -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    def parallelize(model: nn.Module) -> nn.Module:
        plan = {
            "blocks.0": PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),), use_local_output=False
            ),
            "blocks.*.norm": SequenceParallel(sequence_dim=0),
            "blocks.*.up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
            "blocks.*.down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        }
        return parallelize_module(model, mesh_of("tp"), plan)

    return compare(Net, parallelize, same_data)


@scenario
def both() -> dict[str, Any]:
    """Sharded over one dimension of a mesh and tensor parallel over the other."""

    def parallelize(model: nn.Module) -> nn.Module:
        mesh = mesh_of("dp", "tp")
        split(model.blocks, mesh["tp"])
        return shard(model, model.blocks, mesh["dp"])

    def give(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank() // 2)
        return torch.randn(4, 8, generator=generator)

    return compare(Net, parallelize, give)


@scenario
def hybrid() -> dict[str, Any]:
    """Sharded over one dimension of a mesh, replicated over the other."""
    return compare(Net, lambda model: shard(model, (), mesh_of("replica", "shard")))


# Pipeline parallel


@scenario
def pipeline() -> dict[str, Any]:
    return two_stages(dist.get_rank(), None, lambda part: part)


@scenario
def pipeline_of_shards() -> dict[str, Any]:
    """Each stage is on two ranks, sharded. (As DistributedDataParallel torch 2.13 fails, watched or not.)"""
    mesh = mesh_of("pp", "dp")
    return two_stages(
        mesh.get_local_rank("pp"), mesh.get_group("pp"), lambda part: shard(part, part, mesh["dp"])
    )


def two_stages(number: int, group: Any, parallelize: Parallelize) -> dict[str, Any]:
    """The stage of this number, in a group with one rank of each; watched before it is made a stage and after."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    def run(when: str, **options: Any) -> Trained:
        torch.manual_seed(0)
        net = Net()
        part: nn.Module = (
            nn.Sequential(net.blocks[0]) if number == 0 else nn.Sequential(net.blocks[1], net.head)
        )
        watch = start_watch(part, **options) if when == "before" else None
        part = parallelize(part)
        stage = PipelineStage(part, number, 2, torch.device("cpu"), group=group)
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
    seen: dict[str, Any] = {"stage": number, "events": dict(plain.counted.events)}
    for when in ("before", "after"):
        for gradients in (False, True):
            seen[f"{when}, gradients={gradients}"] = difference(plain, run(when, gradients=gradients))
    return seen


# Where in the whole tensor


@scenario
def places() -> dict[str, Any]:
    """One bad element in each shard, of tensors that do and do not divide evenly: its place, and that by a gather."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    meshes = [mesh_of("dp")] + ([mesh_of("dp", "tp")] if dist.get_world_size() == 4 else [])
    seen = []
    for mesh in meshes:
        chosen = list(product((Shard(0), Shard(1), Replicate()), repeat=mesh.ndim))
        for shape in ((8, 6), (7, 5), (3, 1), (1, 9)):
            for placements in chosen:
                whole = torch.arange(1.0, 1.0 + shape[0] * shape[1]).reshape(shape)
                x = distribute_tensor(whole, mesh, placements)
                if x.to_local().numel():
                    x.to_local().view(-1)[-1] = INF
                module = nn.Identity()
                with watching.watch(module, on_nonfinite="record", read="weights buffers inputs") as watch:
                    module(x)
                report = watch.report()
                record = report.frames[0].records[0]
                assert record.placement is not None
                index = report.finding.index if report.finding is not None else None
                found = None if index is None else record.placement.in_whole(index)
                _, start = compute_local_shape_and_global_offset(x.shape, mesh, placements)
                gathered = x.full_tensor()
                cut = any(isinstance(one, Shard) for one in placements)
                seen.append(
                    {
                        "empty": x.to_local().numel() == 0,
                        "cut": cut,
                        "bad in the whole": found is not None and gathered[found].item() == INF,
                        "value there": None if found is None else whole[found].item(),
                        "last of the shard": distribute_tensor(whole, mesh, placements)
                        .to_local()
                        .view(-1)[-1:]
                        .tolist(),
                        "start": None if record.placement.start is None else list(record.placement.start),
                        "start by torch": list(start),
                        "says so": found is not None and f"{list(found)} of the whole" in report.to_text(),
                        "shape": list(record.shape or ()) == list(shape),
                    }
                )
    return {"seen": seen}


def main() -> None:
    warnings.simplefilter("ignore")
    path, *wanted = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)
    seen = {}
    for name in wanted:
        try:
            seen[name] = SCENARIOS[name]()
        except Exception:
            seen[name] = {"error": traceback.format_exc()}
            break  # the other ranks may be in a collective that this one never comes to
    sys.stdout.write(f"{json.dumps(seen)}\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
