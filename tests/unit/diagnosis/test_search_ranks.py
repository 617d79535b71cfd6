"""A failure in a job of several ranks: what can run alone is run again, and nothing waits for another rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from nanwatch.diagnosis.batch_snapshot import BatchSnapshot
from nanwatch.diagnosis.search import find_operation
from nanwatch.report.finding import Finding
from support.examined import snapshot_of
from support.toys import Does, fault_of
from support.watching import watch


class Gathers(nn.Module):
    """A module whose forward adds up over the ranks, or says that it does not."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.gathers = gathers

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        if self.gathers:
            torch.distributed.all_reduce(x)
        return torch.log(x)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """This process is rank 0 of 4; its collectives wait for nobody."""
    import torch.testing._internal.distributed.fake_pg

    torch.distributed.init_process_group("fake", rank=0, world_size=4)
    yield
    torch.distributed.destroy_process_group()


def failed_once(model: nn.Module, x: Tensor) -> tuple[BatchSnapshot, Finding]:
    start = snapshot_of(model, (x,), {})
    with watch(model, on_nonfinite="record", peer_timeout=0) as w:
        model(x)
    finding = w.report().finding
    assert finding is not None
    return start, finding


def test_the_backward_of_a_replica_runs_again_alone(four_ranks: None) -> None:
    """The statements call the replica itself, whose reducer would wait for the gradients of all ranks."""
    model = nn.parallel.DistributedDataParallel(Gathers(False))
    reductions: list[int] = []

    def reduce(bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        reductions.append(bucket.index())
        future = torch.futures.Future[Tensor]()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, lambda _, bucket: reduce(bucket))
    with watch(model, gradients=True, peer_timeout=0):
        model(torch.full((2,), 1e-39)).mul(10.0).sum().backward()
        finding = fault_of(torch.optim.SGD(model.parameters()).step).finding
    assert (finding.operation, len(reductions)) == ("LogBackward0", 1)
    assert "found by running line" in " ".join(finding.remarks)


def test_a_replica_of_one_process_runs_again_in_a_child() -> None:
    """A forked child has no thread of gloo, so its collectives would not end, as that which sends a buffer."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        root = Does(lambda norm, x: norm(x).mul(0).sum().sqrt(), nn.BatchNorm1d(2))
        model = nn.parallel.DistributedDataParallel(root)
        with watch(model.module, gradients=True):
            loss = model(torch.randn(4, 2))
            loss.backward()
            finding = fault_of(torch.optim.SGD(model.parameters()).step).finding
        with watch(adds := Gathers(True)):
            refused = fault_of(adds, torch.zeros(2)).finding
    finally:
        torch.distributed.destroy_process_group()
    assert finding.operation == "SqrtBackward0"
    assert "would wait for the other ranks" in " ".join(refused.remarks)
    assert "found by running line" in " ".join(finding.remarks)


def test_a_collective_is_not_waited_for(four_ranks: None) -> None:
    """Neither one that the model's own code calls, nor those of a library that shards, also after bad data."""
    start, finding = failed_once(Gathers(True), torch.zeros(2))
    seen = find_operation(start, finding, model=start.module)
    assert seen.step is None
    assert any("would wait for the other ranks" in one for one in seen.finding.remarks)
    sharded = type("Sharded", (Gathers,), {"__module__": "deepspeed.runtime"})(False)
    start, finding = failed_once(sharded, torch.zeros(2))
    seen = find_operation(start, finding, model=sharded)
    assert ["4 processes" in remark for remark in seen.finding.remarks[len(finding.remarks) :]] == [True]
    start, finding = failed_once(sharded, torch.full((2,), torch.nan))
    seen = find_operation(start, finding, model=sharded)
    assert (finding.origin, seen.step, seen.finding.extent) == ("data", None, "all")
