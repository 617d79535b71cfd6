"""Copies of a watched model, and what torch makes of one: traces, exports, compiled and mapped calls."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.session.api import watch
from support.toys import fault_of, mlp, names

INF = float("inf")

# Copies


def test_copies_and_files_know_nothing_of_the_watch(tmp_path: Path) -> None:
    """deepcopy, pickle, torch.save and state_dict of a watched model are those of an unwatched one."""
    model, plain = mlp(), mlp()
    x = torch.randn(2, 3)
    with watch(model) as w:
        model(x)
        torch.save(model, tmp_path / "model.pt")
        copies = [
            copy.deepcopy(model),
            copy.copy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(tmp_path / "model.pt", weights_only=False),
        ]
        assert list(model.state_dict()) == list(plain.state_dict())
        for other in copies:
            assert list(other.__dict__) == list(plain.__dict__)
            assert torch.equal(other(x), plain(x))
        copies[0][2].weight.data.fill_(INF)
        copies[0](x)  # raises nothing: nobody watches it
        with watch(copies[0]) as v:
            fault_of(copies[0], x)
    assert {name for _, name in names(w)} == {"0", "1", "2", ""}
    assert v.batch == 0


def test_a_replica_computes_with_its_own_parameters() -> None:
    """The replica that DataParallel makes of a module has the copy's weights and is not recorded."""
    model = nn.Linear(2, 2)
    with watch(model) as w:
        replica = model._replicate_for_data_parallel()
        replica.weight, replica.bias = torch.full((2, 2), 3.0), torch.zeros(2)
        assert replica(torch.ones(1, 2)).tolist() == [[6.0, 6.0]]
        model(torch.ones(1, 2))
    assert names(w) == [(0, "")]


# Tracing and transforming


def test_inference_mode_is_recorded() -> None:
    """A forward in inference mode has the ranges of one under no_grad."""
    model = mlp()
    x = torch.randn(2, 3)
    with watch(model) as w:
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)
    first, second = w.frames[:4], w.frames[4:]
    assert [frame.records for frame in first] == [frame.records for frame in second]


def test_vmap_says_that_it_is_not_checked() -> None:
    """Values inside vmap cannot be read: the result is right, the frames say so, and the weights are still read."""
    model = mlp()
    x = torch.randn(5, 3)
    with watch(model) as w:
        assert torch.allclose(torch.func.vmap(model)(x), nn.Sequential.forward(model, x))
    records = w.frames[0].records
    assert [record.note and record.note.kind for record in records] == [
        None,
        None,
        "not_checked",
        "not_checked",
    ]
    assert records[0].abs_max == model[0].weight.abs().max().item()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_of_a_watched_model_is_that_of_the_plain_one() -> None:
    """torch.jit.trace goes through, its graph has no more nodes, and what it makes works after stop()."""
    model, plain = mlp(), mlp()
    x = torch.randn(2, 3)
    with watch(model):
        traced = torch.jit.trace(model, x)
    nodes = [
        [node.kind() for node in one.inlined_graph.nodes()] for one in (traced, torch.jit.trace(plain, x))
    ]
    assert nodes[0] == nodes[1]
    assert torch.equal(traced(x), plain(x))


def made_of_a_watched(make: Callable[[nn.Module], Any], called: list[str]) -> Any:
    """Return `make(watched model)`: its code is that of a plain model, and its call calls the watched modules."""
    model, plain = mlp(), mlp()
    x = torch.randn(2, 3)
    with watch(model) as w:
        made = make(model)
        assert torch.equal(made(x), plain(x))
        assert [name for _, name in names(w)] == called
    assert made.code == make(plain).code
    return made


def test_a_script_of_a_watched_model_is_that_of_the_plain_one() -> None:
    """torch.jit.script sees the modules as they are; what it makes is not watched and computes the same."""
    made_of_a_watched(torch.jit.script, [])


def test_a_graph_module_of_a_watched_model_calls_its_parts() -> None:
    """torch.fx traces through a watch; the graph calls the same watched modules, from outside, so each is a batch."""
    graph = made_of_a_watched(torch.fx.symbolic_trace, ["0", "1", "2"])
    with watch(graph) as w:
        graph(torch.randn(2, 3))
    assert names(w) == [(0, "0"), (0, "1"), (0, "2"), (0, "")]


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_of_a_watched_model_is_that_of_the_plain_one(strict: bool) -> None:
    """torch.export gives the same graph, strict and not."""
    model, plain = mlp(), mlp()
    x = torch.randn(2, 3)
    with watch(model):
        exported = torch.export.export(model, (x,), strict=strict)
    expected = torch.export.export(plain, (x,), strict=strict)
    assert [str(n.target) for n in exported.graph.nodes] == [str(n.target) for n in expected.graph.nodes]
    assert torch.equal(exported.module()(x), plain(x))
