"""The choice of the model in a running program. The search for it changes nothing."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.session.model_finder import (
    ModelFinder,
    is_inside_a_call,
    may_be_trained,
)

X = torch.ones(2, 3)


class Teacher(nn.Module):
    """Holds a model where nobody sees that it is one: in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(3, 3)
        self.hidden = [nn.Linear(3, 3)]

    def forward(self, x):
        return self.hidden[0](self.own(x))


def frozen(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("held", [True, False])
def test_what_may_be_trained(free, training, held):
    """Parameters that require a gradient, and training mode or an optimizer: the whole table."""
    module = nn.Linear(3, 3).train(training)
    if not free:
        frozen(module)
    ids = {id(module.weight)} if held else {1}
    assert may_be_trained(module, lambda: ids) == (free and (training or held))


def test_a_module_without_parameters_is_not_trained():
    """Losses, activations and transforms are never the model."""
    assert not may_be_trained(nn.MSELoss(), lambda: {id(X)})


def found_in(program, class_name=None):
    found: list[nn.Module] = []
    with ModelFinder(found.append, class_name) as outermost:
        program()
    assert nn.Module._compiled_call_impl is None
    return found, outermost


def test_the_model_is_found_among_other_modules():
    """A loss, a metric, a frozen teacher in evaluation mode and one in training mode come first."""
    net, loss, teacher = nn.Linear(3, 3), nn.MSELoss(), frozen(nn.Linear(3, 3))

    def program():
        loss(X, X)
        teacher.eval()(X)
        teacher.train()(X)
        net(X)
        net(X)

    found, outermost = found_in(program)
    assert found == [net]
    assert list(outermost.passed_over) == ["MSELoss", "Linear"]


@pytest.mark.parametrize("grad", [True, False])
def test_a_model_in_evaluation_mode_is_known_by_its_optimizer(grad):
    """One that is made before the first call is found then, an evaluation under no_grad among them; one that is made
    later, when it has made a step."""
    early, late, unknown = (nn.Linear(3, 3).eval() for _ in range(3))
    optimizer = torch.optim.SGD(early.parameters())

    def program():
        with torch.set_grad_enabled(grad):
            early(X)
            late(X)
            unknown(X)
        step = torch.optim.SGD(late.parameters())
        late.weight.grad = torch.ones(3, 3)
        step.step()
        assert not any(one is late for one in seen)
        with torch.set_grad_enabled(grad):
            late(X)
            unknown(X)

    seen: list[nn.Module] = []
    with ModelFinder(seen.append):
        program()
    assert seen == [early, late]
    assert optimizer.param_groups


def test_the_holder_is_the_model():
    """Parts that are called one by one belong to the module that holds them, as with a LightningModule."""
    whole = nn.ModuleDict({"encoder": nn.Linear(3, 3), "head": nn.Linear(3, 3)})
    found, _ = found_in(lambda: whole["head"](whole["encoder"](X)))
    assert found[0] is whole


def test_what_is_called_inside_is_not_the_model():
    """Neither a hidden part of a model that is watched, nor the parts of one that is not."""
    model = Teacher()
    watches = []
    with ModelFinder(lambda one: watches.append(nanwatch.watch(one))):
        model(X)
        model(X)
    assert len(watches) == 1
    assert watches[0].batch == 1
    teacher = frozen(Teacher())  # all but the hidden part
    assert may_be_trained(teacher.hidden[0], set)
    found, _ = found_in(lambda: teacher(X))
    assert found == []
    assert not is_inside_a_call(None)


def test_by_class_name():
    """With a pattern only classes that match count, trained or not, and inside a call too."""
    net = frozen(nn.Sequential(nn.Linear(3, 3), nn.ReLU())).eval()
    found, outermost = found_in(lambda: net(X), "Lin*")
    assert found == [net[0]]
    assert "Sequential" in outermost.passed_over


def test_the_first_call_is_watched_whole():
    """The model is watched from its very first call on, the root's frame included."""
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    watches = []
    with ModelFinder(lambda one: watches.append(nanwatch.watch(one))):
        net(X)
        net(X)
    (watch,) = watches
    assert [(frame.batch, frame.name) for frame in watch.frames] == [
        (b, n) for b in (0, 1) for n in ("0", "1", "")
    ]


@pytest.mark.compile
def test_programs_go_on_as_they_did():
    """Results, errors, copies, pickles, scripts, traces and compilation are those of a program that nobody looks at."""
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    expected = net(X)
    for wanted in (None, "NoSuch"):
        with ModelFinder(lambda model: None, wanted):
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
