"""watch: what it sees, when it raises, and that the model does not notice."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.report.report import NonFiniteError
from nanwatch.session.api import DeferredWatch, watch
from nanwatch.session.kinds import Audit
from nanwatch.session.model_finder import ModelFinder
from nanwatch.sinks.sink import Sink
from support.toys import Scale

INF = float("inf")


def test_record_keeps_the_start_of_the_failure() -> None:
    model = nn.Sequential(Scale(1.0), Scale(1.0))
    with watch(model, on_nonfinite="record", max_frames=3) as w:
        for factor in (1.0, INF, INF, 1.0):
            model[1].factor = factor
            model(torch.ones(1))
        first = w.report()
        assert (first.batch, first.finding.batch, first.finding.module) == (1, 1, "1")
        assert [(f.batch, f.name) for f in first.frames] == [(0, ""), (1, "0"), (1, "1")]
        w.pause()
        model(torch.ones(1))
        w.resume()
        assert (w.batch, [f.batch for f in w.frames]) == (3, [3, 3, 3])
        model[1].factor = INF
        model(torch.ones(1))
    assert w.report().batch == 4
    assert issubclass(NonFiniteError, ValueError)


@pytest.mark.parametrize(
    ("wrap", "options", "names"),
    [
        (nn.Sequential, {"modules": ["0.0.?", "0.1"]}, ["0.0.0", "0.0.1", "0.1"]),
        (nn.Sequential, {"ignore_modules": "0.0.*"}, ["0.0", "0.1", "0", ""]),
        (nn.Sequential, {"modules": "0.0*", "ignore_modules": ("*.1",)}, ["0.0.0", "0.0"]),
        (nn.Sequential, {"modules": "(root)"}, [""]),
        (nn.DataParallel, {"modules": "1"}, ["1"]),
        (nn.DataParallel, {"modules": "module.1"}, ["1"]),
        (nn.DataParallel, {"modules": "module.*"}, ["0.0", "0.1", "0", "1", ""]),
        (nn.DataParallel, {"modules": ["module", "1"]}, ["1", ""]),
        (nn.DataParallel, {"ignore_modules": ["module.0*", "1"]}, [""]),
    ],
)
def test_patterns_choose_modules(wrap: type[nn.Module], options: dict[str, Any], names: list[str]) -> None:
    """By names with or without a wrapper's prefix, as globs; a batch is still a call of the root."""
    model = wrap(nn.Sequential(nn.Sequential(Scale(), Scale()), Scale()))
    with watch(model, **options) as w:
        model(torch.ones(1))
        model(torch.ones(1))
    assert [(f.batch, f.name) for f in w.frames] == [(batch, name) for batch in (0, 1) for name in names]


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        ("model", {}, TypeError, r"needs a torch.nn.Module, got str"),
        (nn.ReLU, {}, TypeError, r"got the class ReLU; pass ReLU\(...\)"),
        (torch.jit.script(nn.ReLU()), {}, TypeError, r"before torch.jit"),
        (nn.ReLU(), {"max_frame": 3}, TypeError, r"no option 'max_frame'; close names: max_frames"),
        (nn.ReLU(), {"max_frames": 10**9}, ValueError, r"max_frames should be at most 1000000"),
        (nn.ReLU(), {"on_nonfinite": "explode"}, ValueError, r'"raise", "warn", "record" .* got \'explode\''),
        (nn.ReLU(), {"read": "weight"}, ValueError, r"read should be one or more words of .* got 'weight'"),
        (nn.ReLU(), {"read": "weights", "gradients": True}, ValueError, r"gradients needs the outputs"),
        *(
            (nn.ReLU(), {"sinks": x}, TypeError, r"sinks should be a nanwatch.Sink, a S")
            for x in (3, [print, 0], Sink)
        ),
        (nn.ReLU(), {"sinks": "runs/a"}, ValueError, r"'runs/a', and there is no sink.*tensorboard:FOLDER"),
        (nn.ReLU(), {"sinks": "wandb:project"}, ValueError, r"takes no 'project'; say that to wandb.init"),
        (nn.ReLU(), {"trace": 3}, TypeError, r"trace should be a path or a nanwatch.Trace, got 3"),
        (nn.Sequential(nn.ReLU()), {"modules": "encoder"}, ValueError, r"'encoder' matches no module"),
        (nn.Linear(1, 1), {"audit": Audit(frozen="wieght")}, ValueError, r"no weight; close names: weight$"),
        (nn.ReLU(), {"ignore_modules": "*"}, ValueError, r"leave no module to watch"),
    ],
)
def test_bad_arguments_are_named(model: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        watch(model, **options)
    if isinstance(model, nn.Module) and not isinstance(model, torch.jit.ScriptModule):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_watch_of_the_same_model_with_the_same_options_takes_the_place_of_the_first() -> None:
    """As in a notebook's cell that runs again; other options are another watch, which sees its own batches."""
    model = nn.Sequential(nn.Linear(2, 2))
    first, other, second = watch(model), watch(model, every=2), watch(model)
    model(torch.ones(1, 2))
    assert [one.batch for one in (first, other, second)] == [None, 0, 0]
    third = watch(model)
    model(torch.ones(1, 2))
    assert [one.batch for one in (second, third)] == [0, 0]


def test_a_class_that_hides_the_calls_of_its_modules_is_named() -> None:
    class Shadow(nn.Module):
        _compiled_call_impl = None

    with pytest.warns(RuntimeWarning, match="calls of Shadow are not recorded"):
        watch(nn.Sequential(Shadow()))


def test_a_deferred_watch_watches_one_model_at_a_time():
    """To start again is to leave the model before. Options are checked at once, patterns when there is a model."""
    with pytest.raises(TypeError, match="'max_frame'"):
        DeferredWatch({"max_frame": 1})
    with pytest.raises(ValueError, match="matches no module"):
        DeferredWatch({"modules": "encoder"}).start(nn.Linear(2, 2))
    first, second, scaler = nn.Linear(2, 2), nn.Linear(2, 2), torch.amp.GradScaler("cpu")
    deferred = DeferredWatch({"gradients": True})
    deferred.stop()
    watches = [deferred.start(first, scaler), deferred.start(second, scaler)]
    first(torch.ones(1, 2))
    second(torch.ones(1, 2))
    deferred.stop()
    assert [watch.batch for watch in watches] == [None, 0]
    assert all(module._compiled_call_impl is None for module in (first, second))
    assert watches[0]._options.scaler is scaler


def test_the_holder_is_the_model():
    """Parts that are called one by one belong to the module that holds them, also where one of them holds it too."""

    class Whole(nn.ModuleDict):
        def training_step(self):
            self["head"](self["encoder"](torch.ones(2, 3)))

    for is_held in (False, True):
        whole, found = Whole({"encoder": nn.Linear(3, 3), "head": nn.Linear(3, 3)}), list[nn.Module]()
        whole["head"].parent = whole if is_held else None
        with ModelFinder(found.append):
            whole.training_step()
        assert found[0] is whole
        assert nn.Module._compiled_call_impl is None

    def step(holders, rate=1.0):
        names, rate = locals(), 0.5  # a dict that would change if the frame was read
        holders[0]["part"](torch.ones(2, 3))
        return names["rate"], rate

    with ModelFinder(found.append):
        part = nn.Linear(3, 3)
        assert step([nn.ModuleDict({"part": part}) for _ in range(2)]) == (1.0, 0.5)
    assert found[-1] is part


@pytest.mark.compile
def test_programs_go_on_as_they_did():
    """Results, errors, copies, pickles, scripts, traces and compilation are those of a program that nobody looks at."""
    net, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.ones(2, 3)
    expected = net(x)
    with ModelFinder(lambda model: None):
        ways = [torch.compile(way, backend="eager", fullgraph=True) for way in (lambda x: net(x), net)]
        ways += [net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
        ways += [torch.jit.script(net), torch.fx.symbolic_trace(net), torch.export.export(net, (x,)).module()]
        assert [torch.equal(way(x), expected) for way in ways] == [True] * 8
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(torch.ones(2, 2))
    torch._dynamo.reset()
