"""Real ranks of which one flips a bit: the others name it, and a healthy job says nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import nanwatch
from nanwatch.ranks import exchange
from support.parallel_models import shard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]
RANKS, EVERY = 4, 5


def parallel(form: str, model: nn.Sequential) -> nn.Module:
    if form == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return shard(model, model, dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def train(rank: int, folder: str, form: str, odd_rank: int = -1, flip_at: int = 4) -> None:
    """Train three checks long. One rank flips a bit of a weight, without a sign that PyTorch would see."""
    torch.set_num_threads(1)
    exchange.FAREWELL = 20.0  # a busy machine
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = parallel(form, nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    with nanwatch.watch(model, replicas=EVERY, black_box=False) as watch:
        for step in range(1, 3 * EVERY + 1):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == odd_rank and step == flip_at:
                weight = next(model.parameters()).detach()
                weight = weight.to_local() if hasattr(weight, "to_local") else weight
                weight.data.view(torch.int32).reshape(-1).numpy()[3] ^= 1 << 20
    seen = [(x.step, x.ranks, x.is_majority) for x in watch.replica_differences]
    Path(folder, str(rank)).write_text(repr(seen))
    dist.barrier()
    dist.destroy_process_group()


def differences(folder: Path, form: str, *fault: int) -> list[tuple[int, tuple[int, ...], bool]]:
    mp.spawn(train, args=(str(folder), form, *fault), nprocs=RANKS)
    return [difference for rank in range(RANKS) for difference in eval((folder / str(rank)).read_text())]


@pytest.mark.parametrize("form", ["ddp", "hsdp"])
def test_healthy_ranks_say_nothing(tmp_path: Path, form: str) -> None:
    assert differences(tmp_path, form) == []


@pytest.mark.parametrize("step", [EVERY, 3 * EVERY])
def test_the_rank_that_is_odd_is_named_by_majority(tmp_path: Path, step: int) -> None:
    """At the next check, also the last one, by all ranks."""
    assert differences(tmp_path, "ddp", 2, step - 1) == [(step, (2,), True)] * RANKS


def test_of_two_replicas_both_are_named(tmp_path: Path) -> None:
    """Of HSDP's shards there are two copies: no majority says which is wrong."""
    assert {difference[1:] for difference in differences(tmp_path, "hsdp", 3)} == {((1, 3), False)}
