"""Healthy trainings of two ranks for judge_update_ranks.py, and a few with a fault that is to be found.

Each is a function of a Run, which trains the model that it is given. The ranks hold what such jobs hold: replicas,
shards, experts, stages, or models of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from _rank_models import Expert, Sharded, Step, alone, average, mlp
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import nanwatch

STEPS = 8
HEALTHY: dict[str, Callable[[Run], object]] = {}
FAULTY: dict[str, tuple[str, Callable[[Run], object]]] = {}


def nothing(_: int) -> None:
    """Do nothing."""


class Run:
    """One training, watched or not. `findings` are the watch's, `model` the trained one."""

    def __init__(self, *, watched: bool) -> None:
        self.watched = watched
        self.findings: tuple[Any, ...] = ()
        self.model: nn.Module = nn.Identity()
        self.rank = dist.get_rank()

    @contextlib.contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Train inside the audit of each step."""
        self.model = model
        if not self.watched:
            yield
            return
        with nanwatch.watch(model, updates=1, black_box=False) as watch:
            yield
        self.findings = watch.updates

    def data(self, step: int, rows: int = 8, *, same: bool = False) -> tuple[Tensor, Tensor]:
        """Return a batch, which is the same on all ranks or this rank's own."""
        generator = torch.Generator().manual_seed(77 * step + (0 if same else self.rank))
        return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)

    def backward(
        self,
        call: Callable[[Tensor], Tensor],
        optimizer: Any,
        step: int,
        rows: int = 8,
        *,
        same: bool = False,
    ) -> None:
        """Make the gradients of one batch."""
        x, y = self.data(step, rows, same=same)
        optimizer.zero_grad()
        mse_loss(call(x), y).backward()

    def train(
        self,
        model: nn.Module,
        call: Callable[[Tensor], Tensor] | None = None,
        optimizer: Any = None,
        *,
        before: Step = nothing,
        after: Step = nothing,
        rows: int = 8,
        same: bool = False,
        skipped: int = -1,
    ) -> None:
        """Train the model through `call`. `before` and `after` are called around each step but the skipped one."""
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
        with self.watch(model):
            for step in range(STEPS):
                self.backward(call or model, optimizer, step, rows, same=same)
                before(step)
                if step != skipped:
                    optimizer.step()
                after(step)


def healthy(training: Callable[[Run], object]) -> Callable[[Run], object]:
    """Enter a training of which nothing may be said."""
    HEALTHY[training.__name__] = training
    return training


def faulty(kind: str) -> Callable[[Callable[[Run], object]], Callable[[Run], object]]:
    """Enter a training with a fault of this kind."""

    def enter(training: Callable[[Run], object]) -> Callable[[Run], object]:
        FAULTY[training.__name__] = kind, training
        return training

    return enter


@healthy
def ddp(run: Run) -> None:
    model = mlp()
    run.train(model, DistributedDataParallel(model))


@healthy
def unequal_batches(run: Run) -> None:
    model = mlp()
    run.train(model, DistributedDataParallel(model), rows=4 + 8 * run.rank)


@healthy
def uneven_inputs(run: Run) -> None:
    model = mlp()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with run.watch(model), parallel.join():
        for step in range(4 + 4 * run.rank):
            run.backward(parallel, optimizer, step)
            optimizer.step()


@healthy
def all_leave_out_a_step(run: Run) -> None:
    model = mlp()
    run.train(model, DistributedDataParallel(model), skipped=1)


@healthy
def one_rank_leaves_out_a_step(run: Run) -> None:
    model = mlp()
    run.train(model, before=average(model), skipped=1 if run.rank else -1)


@healthy
def one_rank_tries_a_batch(run: Run) -> None:
    model = mlp()
    parallel = DistributedDataParallel(model)
    if run.rank == 0:
        model(run.data(0)[0])
    run.train(model, parallel)


@healthy
def accumulated(run: Run) -> None:
    model = mlp()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with run.watch(model):
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(3):
                x, y = run.data(3 * step + part)
                with parallel.no_sync() if part < 2 else contextlib.nullcontext():
                    (mse_loss(parallel(x), y) / 3).backward()
            optimizer.step()


@healthy
def one_rank_evaluates(run: Run) -> None:
    model = mlp()

    def evaluate(step: int) -> None:
        if run.rank == 0:
            model.eval()
            with torch.no_grad():
                model(run.data(step)[0])
            model.train()

    run.train(model, DistributedDataParallel(model), after=evaluate)


@healthy
def one_rank_makes_the_state(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallel = DistributedDataParallel(model)
    with run.watch(model):
        if run.rank == 0:
            for x in model.parameters():
                x.grad = torch.zeros_like(x)
            optimizer.step()
        for step in range(STEPS):
            run.backward(parallel, optimizer, step)
            optimizer.step()


@healthy
def reduced_by_hand(run: Run) -> None:
    model = mlp()
    run.train(model, before=average(model))


@healthy
def reduced_in_the_step(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: average(model)(0))
    run.train(model, optimizer=optimizer)


@healthy
def zero_redundancy(run: Run) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    run.train(model, DistributedDataParallel(model), optimizer)


@healthy
def models_of_one_seed(run: Run) -> None:
    run.train(mlp())


@healthy
def models_of_their_own(run: Run) -> None:
    run.train(mlp(run.rank))


@healthy
def learning_rates_tried(run: Run) -> None:
    model = mlp()
    run.train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1 * (1 + run.rank)), same=True)


@healthy
def loss_weights_tried(run: Run) -> None:
    model = mlp()

    def scale(_: int) -> None:
        for x in model.parameters():
            x.grad *= 1 + run.rank

    run.train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), before=scale, same=True)


def _averaging(model: nn.Module) -> Step:
    def after(step: int) -> None:
        if step % 4 == 3:
            for x in model.parameters():
                dist.all_reduce(x.data)
                x.data /= dist.get_world_size()

    return after


@healthy
def local_sgd(run: Run) -> None:
    model = mlp()
    run.train(model, after=_averaging(model))


@healthy
def local_sgd_in_ddp(run: Run) -> None:
    model = mlp()
    parallel = DistributedDataParallel(model)
    with parallel.no_sync():
        run.train(model, parallel, after=_averaging(model))


@healthy
def post_local_sgd(run: Run) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )

    model = mlp()
    parallel = DistributedDataParallel(model)
    state = PostLocalSGDState(None, alone(), start_localSGD_iter=3)
    parallel.register_comm_hook(state, post_localSGD_hook)
    run.train(model, parallel)


@healthy
def shards(run: Run) -> None:
    run.train(Sharded(5 + run.rank), same=True)


@healthy
def shards_of_one_seed(run: Run) -> None:
    run.train(Sharded(5), same=True)


@healthy
def shards_of_one_seed_with_dropout(run: Run) -> None:
    run.train(Sharded(5, dropout=0.3), same=True)


@healthy
def experts(run: Run) -> None:
    model = Expert(5 + run.rank)
    run.train(model, before=average(model, model.expert))


@healthy
def experts_of_one_seed(run: Run) -> None:
    model = Expert(5)
    run.train(model, before=average(model, model.expert))


@healthy
def experts_in_groups_of_one(run: Run) -> None:
    model, group = Expert(5), alone()
    own = {id(x) for x in model.expert.parameters()}

    def reduce(_: int) -> None:
        for x in model.parameters():
            dist.all_reduce(x.grad, group=group if id(x) in own else None)

    run.train(model, before=reduce)


@healthy
def stages(run: Run) -> None:
    model = mlp()
    model[0] = nn.Linear(8, 16, bias=run.rank == 0)
    run.train(model)


def _mesh(*shape: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


@healthy
def fully_sharded(run: Run) -> None:
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model, mesh=_mesh(2))
    run.train(model)


@healthy
def hybrid_sharded(run: Run) -> None:
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model, mesh=_mesh(2, 1))
    run.train(model)


@healthy
def fully_sharded_flat(run: Run) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    run.train(FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"), use_orig_params=True))


@healthy
def tensor_parallel(run: Run) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    parallelize_module(model, _mesh(2), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    run.train(model, same=True)


@faulty("not-reduced")
def around_the_wrapper(run: Run) -> None:
    model = mlp()
    parallel = DistributedDataParallel(model)
    run.train(model)
    del parallel


@faulty("clipping")
def scaled_on_one_rank(run: Run) -> None:
    model = mlp()

    def scale(_: int) -> None:
        for x in model.parameters():
            x.grad *= 1 + run.rank

    run.train(model, DistributedDataParallel(model), before=scale)


@faulty("clipping")
def scaled_on_one_replica(run: Run) -> None:
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model, mesh=_mesh(2, 1))

    def scale(_: int) -> None:
        for x in model.parameters():
            x.grad *= 1 + run.rank

    run.train(model, before=scale)


@faulty("rank-lost")
def lost_on_one_rank(run: Run) -> None:
    model = mlp()

    def lose(step: int) -> None:
        for x in model.parameters():
            x.grad *= float(step != 4 or run.rank == 0)

    run.train(model, DistributedDataParallel(model), before=lose)
