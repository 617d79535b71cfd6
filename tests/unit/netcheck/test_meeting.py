"""The parts of netcheck, each by itself: the meeting, and words."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanwatch.netcheck import command, meeting, steps
from nanwatch.netcheck.meeting import Meeting, Member, NoRankError, StepError, Trouble
from nanwatch.util.job import spell_runs
from support.netcheck_ranks import arrival, free_port

HOST = socket.gethostname()


ENVIRONMENT = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


def test_the_member_under_torchrun_and_under_slurm():
    """Both give the same member; torchrun's agent holds the store where it says so, and rank 0 otherwise."""
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
    met = {name: ENVIRONMENT[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    assert Member.of(ENVIRONMENT) == Member.of(slurm | met)
    assert Member.of(ENVIRONMENT).name == f"{HOST}-1"
    assert Member.of(ENVIRONMENT | {"RANK": "0"}).hosts_store
    assert not Member.of(ENVIRONMENT | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}).hosts_store
    restarted = Member.of(ENVIRONMENT | {"TORCHELASTIC_RUN_ID": "j", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert restarted.attempt == "j/2"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"RANK": ""}, "RANK not set"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR, MASTER_PORT not set"),
        ({"RANK": "one"}, "RANK should be a whole number, not negative, got 'one'"),
        ({"RANK": "-1"}, "RANK should be"),
        ({"RANK": "4"}, "RANK=4 with WORLD_SIZE=4"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
    ],
)
def test_an_environment_that_says_nothing_sensible_is_refused(changes, named):
    """The error names the variable and its value, and comes before any wait."""
    with pytest.raises(NoRankError, match=re.escape(named)):
        Member.of(ENVIRONMENT | changes)


@given(st.integers(1, 40))
def test_all_pairs_are_all_pairs(world_size):
    """Every ordered pair of two ranks has a distance in the list."""
    shifts = steps.shifts(world_size, all_pairs=True)
    pairs = {(rank, (rank + shift) % world_size) for rank in range(world_size) for shift in shifts}
    assert pairs == {(a, b) for a in range(world_size) for b in range(world_size) if a != b}


@given(st.integers(1, 20_000))
def test_few_neighbours_in_a_large_world(world_size):
    """Both next ranks are among them or have this one among theirs, none is the rank itself, there are log2 many."""
    shifts = steps.shifts(world_size, all_pairs=False)
    assert all(0 < shift < world_size for shift in shifts)
    assert len(shifts) == len(set(shifts)) == max(0, (world_size - 1).bit_length())
    assert world_size == 1 or shifts[0] == 1


@given(st.sets(st.integers(0, 60)))
def test_spans_say_each_number_once(numbers):
    """Read back, the runs are the numbers."""
    said = spell_runs(sorted(numbers), most=100)
    back: list[int] = []
    for run in filter(None, said.split(", ")):
        first, _, last = run.partition("-")
        back += range(int(first), int(last or first) + 1)
    assert back == sorted(numbers)


def test_spans_are_cut_with_the_number_left():
    """A thousand missing ranks make a line that can be read."""
    assert spell_runs([0, 2, 4, 6, 7], most=2) == "0, 2 and 3 more"


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64KiB", 65536), ("64k", 65536), ("1 MiB", 1 << 20), ("2GB", 2 << 30)]
)
def test_sizes_are_read(text, size):
    """With and without a unit of 1024."""
    assert command._size(text) == size


@pytest.mark.parametrize(
    "arguments",
    [["--sizes", "0"], ["--sizes", "x"], ["--timeout", "0"], ["--timeout", "nan"], ["--rounds", "0"]],
)
def test_options_that_mean_nothing_are_refused(arguments, capsys):
    """With what was given."""
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert repr(arguments[1]) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (
            socket.gaierror(-2, "Name or service not known"),
            "the name node1 has no address here (Name or service",
        ),
        (TimeoutError(), "no answer from node1 port 29500: packets to it or from it are lost"),
        (ConnectionRefusedError(), "nothing listens at node1 port 29500"),
        (
            OSError(101, "Network is unreachable"),
            "node1 port 29500 cannot be reached: Network is unreachable",
        ),
    ],
)
def test_a_master_that_cannot_be_reached_is_told_with_the_reason(monkeypatch, raised, words):
    """When the time is over; until then it is tried again, as a master may only be slow."""
    monkeypatch.setattr(socket, "create_connection", mock.Mock(side_effect=raised))
    monkeypatch.setattr(meeting.time, "sleep", lambda _: None)
    left = iter([9.0, 9.0, 9.0, 0.0])
    with pytest.raises(StepError, match=re.escape(words)):
        meeting.reach(Member.of(ENVIRONMENT), lambda: next(left))
    assert socket.create_connection.call_count == 2


@pytest.fixture
def meetings() -> Iterator[list[Meeting]]:
    """Three ranks' views of one store."""
    port = free_port()
    members = [Member(rank, 3, rank, "node", "127.0.0.1", port, rank == 0, "/0") for rank in range(3)]
    met = [Meeting(member) for member in members]
    for one in met:
        one.open(10.0)
    yield met
    del met


def test_a_second_process_of_the_same_rank_is_refused(meetings):
    """Two launches of one job on one port are common, and what they do to each other is strange."""
    meetings[1].arrive(arrival(1, 1, "first"))
    with pytest.raises(StepError, match="another process on node is rank 1 already"):
        meetings[2].arrive(arrival(1, 1, "second"))
    assert meetings[0].missing() == [0, 2]


def test_the_first_failure_is_one_rank_and_all_hear_of_it(meetings):
    """When many ranks fail at once, one is the first; the others get its name and step."""
    heard: list[tuple[str, bool]] = []
    event = threading.Event()

    def tell(news: str, follows: bool) -> None:
        heard.append((news, follows))
        event.set()

    meetings[2].listen(tell)
    firsts = [meetings[rank].end(Trouble("links", f"rank {rank}")) for rank in (1, 0)]
    assert firsts == [True, False]
    assert event.wait(20)
    assert heard == [("rank 1 failed first, in the step links", True)]
    assert not meetings[0].have_all("ended")
    meetings[2].end(None)
    assert meetings[1].have_all("ended")
    assert meetings[0].first() == 1
    assert meetings[1].outcomes() == {0: Trouble("links", "rank 0"), 1: Trouble("links", "rank 1"), 2: None}


def test_the_summary_tells_the_broken_from_the_stopped_and_the_silent():
    """The summary names those that failed, those that only waited for them, and those that said nothing."""
    outcomes = {
        0: None,
        1: Trouble("links", "x"),
        2: Trouble("links", "y", follows=True),
    }
    assert (
        command.summary_line(outcomes, 5)
        == "netcheck: 1 of 5 ranks OK; broken: 1; stopped by that: 2; not a word from: 3-4"
    )
