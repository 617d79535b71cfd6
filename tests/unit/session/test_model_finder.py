"""The choice of the model in a running program. The search for it changes nothing."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.session.model_finder import ModelFinder

X = torch.ones(2, 3)


class Hidden(nn.Module):
    """Holds a model where nobody sees that it is one: in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(3, 3)
        self.hidden = [nn.Linear(3, 3)]

    def forward(self, x):
        return self.hidden[0](self.own(x))


def found_in(program):
    found: list[nn.Module] = []
    with ModelFinder(found.append):
        program()
    assert nn.Module._compiled_call_impl is None
    return found


def test_models_are_what_has_weights_or_buffers():
    """A teacher in evaluation, a model, a loss with a buffer; no loss without."""
    net, teacher = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False).eval()
    plain, weighted = nn.MSELoss(), nn.CrossEntropyLoss(weight=torch.ones(3))

    def program():
        plain(X, X)
        teacher(X)
        for _ in range(2):
            weighted(net(X), torch.tensor([0, 1]))

    assert found_in(program) == [teacher, net, weighted]


def test_the_holder_is_the_model():
    """Parts that are called one by one belong to the module that holds them, as with a LightningModule."""
    whole = nn.ModuleDict({"encoder": nn.Linear(3, 3), "head": nn.Linear(3, 3)})
    assert found_in(lambda: whole["head"](whole["encoder"](X)))[0] is whole


def test_what_is_called_inside_is_not_the_model():
    """A hidden part of a model is no model of its own, and the model is watched whole from its first call on."""
    model = Hidden()
    watches = []
    with ModelFinder(lambda found: watches.append(nanwatch.watch(found))):
        model(X)
        model(X)
    (watch,) = watches
    assert [frame.name for frame in watch.frames] == ["own", ""] * 2


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
