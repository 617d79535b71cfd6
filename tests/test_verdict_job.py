"""A data-parallel job of real processes: one rank's loss stops being finite, and all say whose it was."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import nanwatch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]

_JOB = """
import sys
import torch, torch.distributed as dist, nanwatch
from nanwatch.verdict import PeerNonFiniteError, Verdict

rank, world, poisoned, raises_at_once = int(sys.argv[1]), 3, int(sys.argv[3]), sys.argv[4] == "True"
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=world)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
watch = nanwatch.watch(model, on_nonfinite="raise" if raises_at_once else "record", microscope=False)
verdict = Verdict(
    None, rank, world, peer_timeout=9.0, on_stuck=lambda origin: print(f"STUCK {rank}: {origin}", flush=True)
)
published = None
try:
    for batch in range(1_000_000):
        if verdict.pending():
            raise PeerNonFiniteError(watch.report(), verdict.settle(published))
        x = torch.ones(2, 4)
        if batch == 5 and rank == poisoned:
            x[0, 1] = float("inf")
        model(x).sum().backward()
        finding = watch.report().finding
        if finding is not None and published is None:
            published = finding
            verdict.publish(finding, 0)
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
except PeerNonFiniteError as error:
    print(f"SETTLED {rank}: {error.origin}", flush=True)
except nanwatch.NonFiniteError as error:
    verdict.publish(error.report.finding, 0)
    print(f"SETTLED {rank}: {verdict.settle(error.report.finding)}", flush=True)
except RuntimeError:  # of an all-reduce whose peer has left
    print(f"SETTLED {rank}: {verdict.settle(published)}", flush=True)
verdict.stop()
"""


@pytest.mark.parametrize("poisoned", [0, 2])
@pytest.mark.parametrize("raises_at_once", [True, False])
def test_all_ranks_name_the_one_whose_data_was_bad(poisoned, raises_at_once):
    """Also those that wait for it in an all-reduce, and those whose weights have become nan by then."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(Path(nanwatch.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _JOB, str(rank), str(port), str(poisoned), str(raises_at_once)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in enumerate(said):
        lines = text.splitlines()
        assert [line.split(":")[0] for line in lines][-1:] == [f"SETTLED {rank}"], text
        for line in lines:
            assert "`input[0]` of 0 (Linear) in batch 5" in line
            assert f"on rank {poisoned}, already in the data of the batch" in line
