"""`torchrun -m nanwatch.netcheck`: real ranks, real failures, each named within its time."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from support.netcheck_ranks import HOST, MARGIN, free_port, rank_environment, step, why
from support.processes import forking_python

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")


# Healthy.


@pytest.mark.slow
def test_four_healthy_ranks_under_torchrun():
    """Each says OK in a line of its own, rank 0 says versions and devices once, and the status is 0."""
    torchrun = (
        forking_python(),
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "4",
        "--master_port",
        str(free_port()),
    )
    done = subprocess.run(
        [
            *torchrun,
            "-m",
            "nanwatch.netcheck",
            "--timeout",
            "60",
            "--memory",
            "1KiB",
            "--sizes",
            "8",
            "64KiB",
        ],
        env=rank_environment(PYTHON_EXEC=forking_python()),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    oks = sorted(line for line in lines if "is OK" in line)
    assert oks == [f"[{HOST}-{rank}] is OK (global rank: {rank}/4)" for rank in range(4)]
    assert lines.count(f"    torch {torch.__version__}") == 1
    assert any(line.startswith(f"    {HOST}: cpu") and line.endswith("(ranks 0-3)") for line in lines)
    assert [line.split()[:2] for line in lines if "B/s" in line] == [["8", "B"], ["64", "KiB"]]
    assert lines[-1] == "netcheck: all 4 ranks are OK"


def test_json_is_one_document_on_the_stdout_of_rank_0(ranks):
    """A program reads it as it is; the lines for people go to stderr, and rank 1 prints nothing on stdout."""
    for rank in range(2):
        ranks.start(rank, 2, "--json", "--timeout", "60")
    (status, document), (other_status, other) = (ranks.end_of(rank, 120) for rank in range(2))
    assert (status, other_status, other) == (0, 0, "")
    found = json.loads(document)
    assert found["ok"] is True
    assert [one["verdict"] for one in found["ranks"]] == ["OK", "OK"]
    assert [one["bytes"] for one in found["all_reduce"]] == [8]
    assert found["first_failure"] is None


@pytest.mark.slow
def test_a_world_of_one_rank_is_well(ranks):
    """There is nobody to talk to, and that is no failure."""
    ranks.start(0, 1, "--timeout", "60")
    status, out = ranks.end_of(0, 120)
    assert status == 0, out
    assert out.endswith("netcheck: the only rank is OK\n")


# Failures.


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(ranks):
    """1 of 2 is started: it says which is missing, and ends."""
    ranks.start(0, 2, "--timeout", "5", "--json")
    status, document = ranks.end_of(0, 5 + MARGIN)
    assert status == 1
    found = json.loads(document)
    assert found["ok"] is False
    assert [one["verdict"] for one in found["ranks"]] == ["broken", "silent"]
    assert found["ranks"][0]["step"] == "arrival"
    assert found["ranks"][0]["why"] == "1 of 2 ranks came; missing: 1"


def test_a_wrong_port_is_named(ranks):
    """Nothing listens there: address and port are in the line."""
    ranks.start(1, 2, "--timeout", "3")
    status, out = ranks.end_of(1, 3 + MARGIN)
    assert status == 1
    assert step(out) == "master"
    assert why(out) == f"nothing listens at 127.0.0.1 port {ranks.port}"


@pytest.mark.slow
def test_a_master_without_an_address_is_named(ranks):
    """The name is in the line, and the name server is given its time."""
    ranks.start(1, 2, "--timeout", "2", MASTER_ADDR="no-such-host.invalid")
    status, out = ranks.end_of(1, 2 + MARGIN)
    assert status == 1
    assert "no-such-host.invalid" in why(out)


@pytest.mark.slow
def test_a_port_where_something_else_answers_ends_in_time(ranks):
    """A server that accepts and is silent holds up a native call for good: the clock ends it."""
    with socket.create_server(("127.0.0.1", ranks.port)):
        ranks.start(1, 2, "--timeout", "4")
        status, out = ranks.end_of(1, 4 + MARGIN)
    assert status == 1
    assert step(out) == "store"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_killed_in_the_middle_is_named_by_the_others(ranks, victim):
    """Also rank 0, that held the store; the others end well before a timeout."""
    for rank in range(3):
        ranks.start(rank, 3, "--rounds", "100000", "--timeout", "20")
    output = ranks.started[0].stdout
    assert output is not None
    assert output.readline().startswith("netcheck: 3 ranks")
    time.sleep(1)
    ranks.started[victim].kill()
    seen: list[bool] = []
    for rank in {0, 1, 2} - {victim}:
        status, out = ranks.end_of(rank, 20 + MARGIN)
        assert status == 1
        assert f"[{HOST}-{rank}] is broken (global rank: {rank}/3)" in out
        # One that had not yet noticed when another told of it says which; that one has looked for itself.
        told = re.fullmatch(rf".*rank [^{victim}] failed first, in the step .*", why(out))
        assert told or f"rank {victim} ({HOST}-{victim}) at 127.0.0.1" in why(out)
        seen.append(told is None)
    assert any(seen)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_when_the_time_is_over(ranks):
    """A stopped rank does not answer, and the summary says which rank said nothing."""
    for rank in range(2):
        ranks.start(rank, 2, "--rounds", "100000", "--timeout", "6", "--json", is_forked=False)
    time.sleep(0.5)
    errors = ranks.started[0].stderr
    assert errors is not None
    while not (line := errors.readline()).startswith("netcheck: 2 ranks"):
        assert line, "rank 0 has ended"
    ranks.started[1].send_signal(signal.SIGSTOP)
    status, document = ranks.end_of(0, 6 + MARGIN)
    found = json.loads(document)
    assert status == 1
    assert [one["verdict"] for one in found["ranks"]] == ["broken", "silent"]


@pytest.mark.slow
def test_sigterm_in_the_middle_is_told_with_the_step(ranks):
    """torchrun ends a node so; a rank that waits in a native call still says where it was."""
    ranks.start(0, 2, "--timeout", "60")
    time.sleep(4)
    ranks.started[0].terminate()
    status, out = ranks.end_of(0, MARGIN)
    assert status in (1, -signal.SIGTERM)
    if status == 1:  # otherwise torch was still being imported
        assert why(out).endswith("stopped by SIGTERM")


@pytest.mark.slow
def test_a_backend_that_is_not_there_breaks_every_rank(ranks):
    """--backend nccl without a GPU: named on each rank, with what would work."""
    for rank in range(2):
        ranks.start(rank, 2, "--backend", "nccl", "--timeout", "20")
    for rank in range(2):
        status, out = ranks.end_of(rank, 20 + MARGIN)
        assert status == 1
        assert step(out) == "backend"


# The clock.

_GUARDED = """
import ctypes, sys
from nanwatch.netcheck import meeting
meeting.LAST_RESORT = 2.0
clock = meeting.Guard(1.0, lambda trouble: print(trouble, flush=True))
with clock.step("a native call"):
    ctypes.{library}(None).sleep(60)
"""


def guarded(library: str) -> subprocess.CompletedProcess[str]:
    script = _GUARDED.format(library=library)
    return subprocess.run(
        [forking_python(), "-c", script], env=rank_environment(), capture_output=True, text=True, timeout=50
    )


@pytest.mark.slow
def test_a_native_call_that_hangs_is_ended_with_its_step():
    """The clock is a thread of its own."""
    done = guarded("CDLL")
    assert done.returncode == 1
    assert "a native call" in done.stdout
    assert "no answer within 1 s" in done.stdout


@pytest.mark.slow
def test_a_native_call_that_hangs_with_the_interpreter_lock_is_ended_too():
    """No Python thread runs then: the stack is on stderr, and the process does not stay."""
    done = guarded("PyDLL")
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert done.stdout == ""


_NEWS = """
from nanwatch.netcheck import meeting
clock = meeting.Guard(20.0, lambda trouble: print(trouble, flush=True))
with clock.step("links"):
    clock.hear("rank 1 failed first, in the step links", True)
    raise meeting.{error}("rank 1 at 10.77.1.2: no answer")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("error", "follows"), [("LinkError", False), ("StepError", True)])
def test_a_link_that_is_broken_is_no_consequence_of_earlier_news(error, follows):
    """If two ranks cannot reach each other, both are broken, whichever reported it first."""
    script = _NEWS.format(error=error)
    done = subprocess.run(
        [forking_python(), "-c", script], env=rank_environment(), capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1
    assert f"follows={follows}" in done.stdout
    assert "no answer; rank 1 failed first" in done.stdout


def test_without_a_launcher_it_says_how_to_start_it():
    """Status 2, and torchrun's command line."""
    done = subprocess.run(
        [forking_python(), "-m", "nanwatch.netcheck"],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "torchrun --nproc_per_node 2 -m nanwatch.netcheck" in done.stderr
