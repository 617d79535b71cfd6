"""A watch in a job of several ranks: whichever fails, every rank says where it was first, and none hangs."""

import gc
import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nanwatch
from nanwatch.ranks import consensus
from nanwatch.ranks.consensus import PeerNonFiniteError, own_store
from nanwatch.report.finding import RankObservation
from nanwatch.report.text import summary
from support import watching
from support.processes import until
from support.sightings import connect, finding, serve
from support.toys import Does, Scale

_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def others() -> None:
    """Threads of other tests, which may hang in a store that has gone, are not counted."""
    _before.clear()
    _before.update(threading.enumerate())


def verdict_threads() -> int:
    return sum(thread.name == "nanwatch consensus" for thread in set(threading.enumerate()) - _before)


def test_a_process_alone_asks_nobody(one_process_mesh):
    """No thread, and an error without an origin: neither without a process group nor in one of one rank."""
    model = nn.Linear(4, 4)
    with pytest.raises(nanwatch.NonFiniteError) as caught, watching.watch(model, rerun=False):
        model(torch.full((2, 4), float("inf")))
    assert (caught.value.origin, verdict_threads()) == (None, 0)


class Job:
    """A job of two as one of its ranks sees it: the other one writes the keys of the same store."""

    def __init__(self, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.group = type("Group", (), {"size": lambda self: 2})()
        monkeypatch.setattr(consensus, "process_group", lambda: self.group)
        monkeypatch.setattr(consensus, "rank_and_world_size", lambda: (0, 2))
        monkeypatch.setattr(consensus, "default_store", lambda: connect(server))
        monkeypatch.setattr(consensus, "_INTERVAL", 0.1)

    def other_fails(self, **facts: Any) -> str:
        """Rank 1 has told and has had its say. Return how its own error begins."""
        store = own_store(f"consensus/{consensus._job.num_settled}", connect(self.server))
        seen = replace(finding(batch=1, module="there", rank=1), **facts)
        consensus.publish(store, RankObservation.of(seen, 1, 3, (0, 1), ""))
        store.add(consensus.NUM_REPORTED, 1)
        store.add(consensus.NUM_LEFT, 1)
        return summary(seen)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job of two, rank 1 of which does what it is told."""
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return Job(serve(), monkeypatch)


def until_told(model: nn.Module) -> None:
    """Batches until another rank's failure ends one; at most about 20 s."""
    for _ in range(400):
        model(torch.ones(2, 4))
        threading.Event().wait(0.05)


def test_the_next_batch_raises_what_another_rank_found(job, tmp_path):
    """With this rank's own frames, which are written down; and so does the batch after the next failure."""
    model = nn.Linear(4, 4)
    watch = watching.watch(model, output_dir=tmp_path, peer_timeout=10)
    at_step = {"phase": "step", "label": "weight.grad", "origin": "received"}
    for facts, how in ({}, ", which produced it"), (at_step, ""):
        told = job.other_fails(**facts)
        with pytest.raises(PeerNonFiniteError, match="of there") as caught:
            until_told(model)
        assert str(caught.value).splitlines()[0] == f"{told}{how}"
        assert caught.value.report.finding is None
        assert caught.value.report.frames
    watch.stop()
    assert verdict_threads() == 0
    assert sorted(path.name for path in tmp_path.glob("peer*")) == ["peer-rank-0", "peer-rank-0.2"]
    assert nanwatch.Report.from_json((tmp_path / "peer-rank-0" / "report.json").read_text()).finding is None


def test_an_error_of_a_collective_inside_a_forward_is_explained(job):
    """RuntimeError of a peer that has gone: the failure of that peer is raised from it."""

    def wait(x: torch.Tensor) -> torch.Tensor:
        job.other_fails()
        raise RuntimeError("Connection closed by peer")

    model = Does(wait)
    with watching.watch(model, peer_timeout=10), pytest.raises(PeerNonFiniteError, match="rank 1") as caught:
        model(torch.ones(2, 4))
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("is_told", [True, False])
def test_an_exception_of_the_users_waits_for_no_rank(job, monkeypatch, is_told):
    """It gets a note, though the other rank never answers. What that call alone holds is not told: it may be caught."""
    divide = Scale(float("inf")) if is_told else lambda x: x / 0
    refuse = Does({}.__getitem__)  # raises KeyError
    model = Does(lambda part, x: part(divide(x)), refuse)
    model.divide = divide
    monkeypatch.setattr("nanwatch.session.failure_handler._PATIENCE", 0.1)
    with watching.watch(model, act_at="batch", rerun=False, peer_timeout=600):
        store = own_store(f"consensus/{consensus._job.num_settled}", connect(job.server))
        with pytest.raises(LookupError) as caught:
            model(torch.ones(2, 4))
        place = "`output` of divide" if is_told else "`input[0]` of parts.0"
        assert f"inf first seen in {place}" in caught.value.__notes__[0]
        assert store.check([consensus.FIRST]) is is_told


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Read error"), True),
        (dist.DistBackendError("remote process exited"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)"), False),
        (ValueError("gloo"), False),
    ],
)
def test_only_the_error_of_a_collective_is_waited_for(job, monkeypatch, error, waits):
    """Once for each error, where it ends a batch and the `with`. Any other is what it was, at once."""
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=map(float, itertools.count()).__next__, sleep=pauses.append)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise error

    model = Does(fail)
    with watching.watch(model, peer_timeout=10):
        monkeypatch.setattr(consensus, "time", clock)
        with pytest.raises(type(error)) as caught:
            model(torch.ones(2, 4))
        assert bool(pauses) is waits
        pauses.clear()
        (link,) = consensus._job.coordinators
        link.explain(caught.value)
        assert not pauses


def test_a_new_group_has_a_new_consensus_and_a_watch_that_is_dropped_ends_it(job):
    model = nn.Linear(4, 4)
    watch = watching.watch(model, peer_timeout=10)
    model(torch.ones(2, 4))
    first, job.group = consensus._job.consensus, type(job.group)()
    model(torch.ones(2, 4))
    has_failed = first.arrive(begins=True, waits=True)  # no model is sharded: there is no barrier
    assert (consensus._job.consensus is first, has_failed) == (False, False)
    until(lambda: verdict_threads() == 1)  # the thread of the first consensus ends
    del watch, model
    # The first collection frees the model, and with it the link that held the rest. Then the thread is told to end.
    gc.collect()
    gc.collect()
    until(lambda: verdict_threads() == 0)
