"""`torchrun -m nanwatch.netcheck`: real ranks, real failures, each named within its time."""

from __future__ import annotations

import signal
import socket
import subprocess
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from support.netcheck_ranks import HOST, MARGIN, Ranks, field, free_port, rank_environment
from support.processes import forking_python, until

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")


@pytest.mark.slow
def test_healthy_ranks_under_torchrun() -> None:
    """Each rank prints one line, and the status is 0."""
    torchrun = ("torch.distributed.run", "--nproc_per_node", "3", "--master_port", str(free_port()))
    line = [forking_python(), "-m", *torchrun, "-m", "nanwatch.netcheck", "--timeout", "60"]
    env = rank_environment(PYTHON_EXEC=forking_python())
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [f"[{HOST}-{rank}] is OK (global rank: {rank}/3)" for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == expected


def test_healthy_ranks_under_slurm(ranks: Ranks) -> None:
    """The variables of srun name the ranks where torchrun's are empty."""
    for rank in range(2):
        slurm = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)}
        ranks.start(rank, 2, "--timeout", "60", RANK="", WORLD_SIZE="", LOCAL_RANK="", **slurm)
    for rank in range(2):
        assert ranks.end_of(rank, 120) == (0, f"[{HOST}-{rank}] is OK (global rank: {rank}/2)\n")


def test_a_rank_that_never_comes_is_named(ranks: Ranks) -> None:
    """Two of three ranks start. Both name the third, within the time limit."""
    for rank in (0, 2):
        ranks.start(rank, 3, "--timeout", "5")
    for rank in (0, 2):
        status, out = ranks.end_of(rank, 5 + MARGIN)
        assert (status, field("step", out)) == (1, "arrival")
        assert field("why", out).startswith("ranks that have not arrived: 1")


@pytest.mark.parametrize(("listens", "reason"), [(False, "Connection refused"), (True, "timed out")])
def test_a_pair_that_cannot_talk_is_named(ranks: Ranks, listens: bool, reason: str) -> None:
    """Rank 1 arrives in the store, but its port refuses connections or never answers."""
    ranks.start(0, 2, "--timeout", "5")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        store = TCPStore("127.0.0.1", ranks.port, None, False, timeout=timedelta(seconds=60))
        store = PrefixStore("nanwatch/netcheck//0", store)
        store.set("arrived/1", f"other-0 {port} 127.0.0.1")
        store.add("arrived", 1)
        status, out = ranks.end_of(0, 5 + MARGIN)
    assert (status, field("step", out)) == (1, "links")
    assert f"rank 1 (other-0) at 127.0.0.1 port {port}: {reason}" in field("why", out)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_in_the_middle_is_named_by_the_others(ranks: Ranks, how: signal.Signals) -> None:
    """Rank 1 disappears once all have arrived, and before it goes on: the others say that they wait for it."""
    waiting = "import sys, time, nanwatch.ranks.netcheck as n; n._Check._send = lambda self: time.sleep(60)"
    program = ("-c", f"{waiting}; print('imported', flush=True); n.main(sys.argv[1:])")
    # Rank 1 imports torch, which takes longer than 5 s on a busy machine, and would not arrive in time.
    lost = ranks.start(1, 3, "--timeout", "60", program=program, is_forked=False)
    assert lost.stdout.readline() == "imported\n"
    for rank in (0, 2):
        ranks.start(rank, 3, "--timeout", "5")
    store = TCPStore("127.0.0.1", ranks.port, None, False, timeout=timedelta(seconds=60))
    store = PrefixStore("nanwatch/netcheck//0", store)
    until(lambda: store.add("linked", 0) == 3, 60)
    lost.send_signal(how)
    outs = [ranks.end_of(rank, 20 + MARGIN) for rank in (0, 2)]
    assert [status for status, _ in outs] == [1, 1]
    assert any(f"rank 1 ({HOST}-1)" in field("why", out) for _, out in outs)


@pytest.mark.parametrize("wrong", [{"RANK": ""}, {"RANK": "2"}, {"MASTER_PORT": "-1"}])
def test_a_process_that_is_no_rank_ends_with_status_2(ranks: Ranks, wrong: dict[str, str]) -> None:
    """The message has the variables and torchrun's command line, and stdout nothing."""
    process = ranks.start(0, 2, **wrong)
    out, errors = process.communicate(timeout=MARGIN)
    assert (process.returncode, out) == (2, "")
    assert "torchrun --nproc_per_node 2 -m nanwatch.netcheck" in errors
    assert all(f"{name}={value!r}" in errors for name, value in wrong.items())
