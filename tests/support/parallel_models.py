"""Small models, and the ways to make them parallel that jobs of several ranks have in common."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WithStatistics(nn.Module):
    """Has running statistics, which DistributedDataParallel broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.net(x))


NAMES = sorted(
    [f"blocks.{i}{part}" for i in range(2) for part in ("", ".norm", ".up", ".down")] + ["head", ""]
)


@cache
def mesh_of(*names: str) -> Any:
    """A mesh of all ranks, by two in its last dimension. Made once, as a mesh may make groups."""
    size = dist.get_world_size()
    shape = (size,) if len(names) == 1 else (size // 2, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(model: nn.Module, blocks: Iterable[nn.Module], mesh: Any, **options: Any) -> nn.Module:
    """FSDP2: each block is a group of parameters, and what is left is one."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def split(blocks: Iterable[nn.Module], mesh: Any) -> None:
    """Tensor parallel: `up` by its columns, `down` by its rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
