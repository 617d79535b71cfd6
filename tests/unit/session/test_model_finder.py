"""The choice of the model in a running program. The search for it changes nothing."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from nanwatch.session.model_finder import ModelFinder

X = torch.ones(2, 3)


def found_in(program):
    found: list[nn.Module] = []
    with ModelFinder(found.append):
        program()
    assert nn.Module._compiled_call_impl is None
    return found


def test_the_holder_is_the_model():
    """Parts that are called one by one belong to the module that holds them, as with a LightningModule."""
    whole = nn.ModuleDict({"encoder": nn.Linear(3, 3), "head": nn.Linear(3, 3)})
    assert found_in(lambda: whole["head"](whole["encoder"](X)))[0] is whole


@pytest.mark.compile
def test_programs_go_on_as_they_did():
    """Results, errors, copies, pickles, scripts, traces and compilation are those of a program that nobody looks at."""
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    expected = net(X)
    with ModelFinder(lambda model: None):
        compiled = torch.compile(lambda x: net(x), backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), expected)
        assert torch.equal(torch.compile(net, backend="eager", fullgraph=True)(X), expected)
        assert torch.equal(net(X), expected)
        assert torch.equal(copy.deepcopy(net)(X), expected)
        assert torch.equal(pickle.loads(pickle.dumps(net))(X), expected)
        assert torch.equal(torch.jit.script(net)(X), expected)
        assert torch.equal(torch.fx.symbolic_trace(net)(X), expected)
        assert torch.equal(torch.export.export(net, (X,)).module()(X), expected)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(torch.ones(2, 2))
    torch._dynamo.reset()
