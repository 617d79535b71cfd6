"""Train on two ranks, of which the second makes a gradient non-finite, in each way of sharing a model: STORE.

Print for each way the error, the rank that it names as the origin, and whether the step has left the weights alone.
"""

import json
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import nanwatch

WAYS = ["plain", "unused", "static", "hook", "no_sync", "zero", "fsdp2", "one shard"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def shared(way: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    if way in ("fsdp2", "one shard"):
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        return net
    if way != "unused":
        net.unused = nn.Identity()
    model = DistributedDataParallel(net, find_unused_parameters=way == "unused", static_graph=way == "static")
    if way == "hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def backward(model: nn.Module, is_bad: bool) -> None:
    mask = torch.ones(3) * (not is_bad)
    ((model(torch.randn(3, 4)).square().mean(-1) * mask).sum() / mask.sum()).backward()


def train(way: str, rank: int) -> tuple[str, int, bool]:
    model = shared(way)
    if way == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam, lr=0.1)
    else:
        optimizer = SGD(model.parameters(), lr=0.1)
    with nanwatch.watch(model, gradients=True, rerun=False):
        for step in range(3):
            is_bad = step == 2 and rank == 1
            optimizer.zero_grad()
            with model.no_sync() if way == "no_sync" else nullcontext():
                backward(model, is_bad and way != "one shard")
            if way == "no_sync":
                backward(model, False)
            if way == "one shard" and is_bad:
                local(next(model.parameters()).grad)[0, 0] = torch.inf
            before = [local(x).detach().clone() for x in model.parameters()]
            try:
                optimizer.step()
            except nanwatch.NonFiniteError as error:
                after = [local(x) for x in model.parameters()]
                is_kept = all(map(torch.equal, before, after)) and step == 2
                return type(error).__name__, error.origin.rank, is_kept
    return "no error", -1, False


def main() -> None:
    number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=number, world_size=count)
    sys.stdout.write(json.dumps([train(way, dist.get_rank()) for way in WAYS]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
