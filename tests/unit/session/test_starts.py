"""The start of a batch: what it had, what was written since, and that it lives only while a backward may come."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanwatch
from nanwatch import watch
from support.examined import comment_of
from support.recorders import WITH_DEVICE, watched
from support.toys import Does, fault_of


class Root(nn.Module):
    """The root of its input and a weight, whose gradient at zero is inf. Its graph does not hold the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.weight).sqrt()


def keep(root: nn.Module, x: Tensor) -> Tensor:
    """Keep the output in the module, and with it the graph."""
    root.latest = root(x)
    return root.latest


def given() -> Tensor:
    """The input of a batch."""
    return torch.tensor([0.0, 1.0, 4.0])


def is_alive(reference: weakref.ref[Any]) -> bool:
    """Return whether the object it refers to is still there, cycles apart."""
    gc.collect()
    return reference() is not None


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize("observed", ["*", "0"])
def test_the_inputs_of_an_evaluation_go_with_its_outputs(observed: str) -> None:
    """In grad mode, with a graph of their own, also of a module that is not observed. Until then they are kept."""
    model = nn.Sequential(Root())
    x = given().requires_grad_() + 1
    alive = weakref.ref(x)
    with watch(model, gradients=True, modules=observed):
        y = model(x)
        del x
        assert is_alive(alive)
        del y
        assert not is_alive(alive)


@pytest.mark.usefixtures("each_recorder")
def test_the_inputs_go_with_a_backward_that_is_fine_and_with_the_next_batch() -> None:
    """Nothing is left for a step where no gradient was bad. At most one batch is kept, while the graphs of two live."""
    model = Does(torch.enable_grad()(lambda root, x: root(x)), Root())
    with watch(model, gradients=True) as w:
        x = given() + 1
        alive = weakref.ref(x)
        model(x).sum().backward()
        del x
        assert not is_alive(alive)
        x = given()
        alive = weakref.ref(x)
        first = model(x)
        del x
        second = model(given())
        assert not is_alive(alive)
        with torch.no_grad():
            third = model(given())
        assert [start.batch for start in w._recorder.ended_starts()] == [1, 2]
        del first, second, third


@pytest.mark.usefixtures("each_recorder")
def test_nothing_is_kept_after_stop() -> None:
    """Neither the inputs nor the model, whether a graph is left or bad backwards that no step took, which keep one."""
    for num_backwards in (0, 3):
        model, x = Root(), given()
        alive = [weakref.ref(model), weakref.ref(x)]
        w = watch(model, gradients=True, on_nonfinite="record", rerun=True)
        y = model(x)
        for _ in range(num_backwards):
            alive.append(weakref.ref(y))
            y.sum().backward()
            model.zero_grad()
            y = model(x)
        assert sum(map(is_alive, alive)) <= 3
        w.stop()
        del model, x
        assert not any(map(is_alive, alive))
        del y


@pytest.mark.usefixtures("each_recorder")
def test_a_model_that_keeps_its_output_is_collected() -> None:
    """A model that holds its graph is freed: no part of the watch that the graph holds refers to the model."""
    model, x = Does(keep, Root()), given()
    alive = [weakref.ref(model), weakref.ref(x)]
    w = watch(model, gradients=True)
    model(x)
    del model, x, w
    assert not any(map(is_alive, alive))


def backward_through_a_checkpoint(model: nn.Module) -> None:
    """The forward is run again in the backward."""
    x = given().requires_grad_()
    checkpoint(model, x, use_reentrant=False).sum().backward()


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize(
    "way", [lambda model: model(given()).sum().backward(), backward_through_a_checkpoint]
)
def test_the_rerun_has_what_it_needs_when_a_step_takes_a_bad_backward(way: Any) -> None:
    """Also where the graph, and with it all else that knows the batch, is gone by then."""
    model = nn.Sequential(Root())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, gradients=True) as w:
        _ = way(model)
        finding = fault_of(optimizer.step).finding
        assert finding.operation == "SqrtBackward0"
        assert w.report().finding is not None


def test_a_list_that_lives_no_longer_than_the_call_of_watch(tmp_path: Path) -> None:
    """Model and loss in a list that nobody holds: what is left of it runs again, and is written."""
    model, loss = nn.Linear(2, 2), Does(lambda x: x.log())
    watch(nn.ModuleList([model, loss]), output_dir=tmp_path)
    finding = fault_of(lambda: loss(model(torch.zeros(1, 2)) * 0)).finding
    assert (finding.module, finding.operation) == ("1", "aten.log.default")
    assert (tmp_path / "batch-1" / "capsule").is_dir()


@pytest.mark.usefixtures("each_recorder")
def test_a_rerun_begins_with_the_buffers_of_its_batch() -> None:
    """The seventh batch divides by zero, as each takes one from a buffer: the re-run begins with what that one had."""
    model = Does(lambda x: x / model.left.sub_(1))
    model.register_buffer("left", torch.tensor(7))
    with watch(model):
        for _ in range(6):
            model(torch.ones(1))
        assert fault_of(model, torch.ones(1)).finding.operation == "aten.div.Tensor"


def fill(x: Tensor) -> None:
    x[0, 0] = float("nan")  # fill


def log(x: Tensor) -> None:
    x.sub_(2)
    x.log_()  # log


def leave(x: Tensor) -> None:
    x.sum()


class Spoils(nn.Module):
    def __init__(self, write: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.write, self.net = write, nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return self.net(x)


@pytest.mark.parametrize("recorder", WITH_DEVICE)
@pytest.mark.parametrize("write", [fill, log, leave])
def test_who_wrote_what_the_batch_holds(write: Callable[[Tensor], None], recorder: str) -> None:
    x = torch.full((2, 4), torch.inf if write is leave else 1.0)
    model = nn.Sequential(Spoils(write))
    with watched(model, recorder):
        finding = fault_of(model, x).finding
    assert (finding.module, finding.label) == ("", "input[0]")
    assert finding.origin == ("data" if write is leave else "produced")
    if write is not leave:
        assert comment_of(finding) == write.__name__
        assert not any("came in with" in remark for remark in finding.remarks)


def gated(part: nn.Module, gate: float = 1.0) -> nn.Module:
    """A module that scales what it hands to its part, by a weight in a list."""
    gates = nn.ParameterList([torch.full((1,), gate)])
    return Does(lambda gates, part, x: part(x.nan_to_num() * gates[0]), gates, part)


@pytest.mark.parametrize("recorder", WITH_DEVICE)
@pytest.mark.parametrize(
    ("options", "module"),
    [
        ({}, "parts.1"),
        ({"ignore_modules": "parts.1"}, "parts.1.parts.1"),
        ({"allow": "inf:parts.1"}, "parts.1.parts.1"),
    ],
)
def test_the_outermost_bad_weight_of_the_open_calls(options: Any, module: str, recorder: str) -> None:
    """Unless its module is ignored or allowed, or nobody called it. A function in the innermost call meets the inf."""
    innermost = Does(nanwatch.watched(torch.neg, name="neg"))
    model = gated(gated(gated(innermost, torch.inf), torch.inf))
    with torch.no_grad(), watched(model, recorder, rerun=False, **options):
        finding = fault_of(model, torch.ones(2)).finding
        model.parts[1].parts[1].parts[0][0].fill_(9)
        alone = fault_of(model.parts[1].parts[1], torch.full((2,), 3e38)).finding
    assert (finding.module, finding.label, finding.origin) == (module, "parts.0.0", "weight")
    assert (alone.label, alone.origin) == ("input[0]", "received")


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_what_the_batch_was_given_is_not_blamed_for_a_call_of_finite_values(recorder: str) -> None:
    """The model takes the nan of its data out, and then overflows. Another thread may have pushed the frame out."""
    model = Does(lambda part, x: part(x.nan_to_num()), Does(lambda x: torch.exp(x * 1000)))
    with watched(model, recorder, on_nonfinite="record", max_frames=1) as w:
        model(x := torch.tensor([torch.nan, 1.0]))
        report = w.report()
        model.parts[0](torch.zeros(1))
        later = w._reports.of_call(report.frames[-1], "", (x,), {})
    for finding in report.finding, later.finding:
        assert (finding.module, finding.label, finding.origin) == ("parts.0", "output", "produced")


class Keys:
    """A key-value cache: each layer writes into it."""

    latest: Tensor


def set_field(cache: Keys, keys: Tensor) -> Tensor:
    cache.latest = keys
    return cache.latest


def append_to_list(cache: list[Tensor], keys: Tensor) -> Tensor:
    cache.append(keys)
    return cache[-1]


class Layer(nn.Module):
    def __init__(self, store: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.keys, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.store, self.scale = store, 1.0

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return self.out(self.store(cache, (self.keys(x) + x) / self.scale))


class Decoder(nn.Module):
    def __init__(self, store: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(store) for _ in range(3))

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, cache)
        return x


@pytest.mark.parametrize("recorder", WITH_DEVICE)
@pytest.mark.parametrize("store", [set_field, append_to_list])
@pytest.mark.parametrize("origin", ["weight", "received"])
def test_what_a_cache_took_in_is_no_data(origin: str, store: Callable[..., Tensor], recorder: str) -> None:
    """At the end of a batch the cache that was passed in holds what the batch has made."""
    model = Decoder(store)
    with torch.no_grad():
        if origin == "weight":
            model.layers[1].keys.weight[0, 0] = torch.inf
        else:
            model.layers[1].scale = 0.0
        with watched(model, recorder, rerun=origin == "received"):
            finding = fault_of(model, torch.ones(2, 4), [] if store is append_to_list else Keys()).finding
    if origin == "weight":
        assert (finding.module, finding.label, finding.origin) == ("layers.1.keys", "weight", "weight")
        return
    # In an object it is told from data by a re-run, which names the operation and its module.
    is_there = store is set_field and recorder != "device"  # else the next layer has replaced it
    place = ("", "input[1][latest]") if is_there else ("layers.1.out", "input[0]")
    assert (finding.module, finding.label) == place
    assert (finding.origin, finding.source_module) == ("received", "layers.1")
    assert finding.remarks[0] == f"{finding.operation} was given the number other = 0.0"


@pytest.mark.usefixtures("each_recorder")
def test_what_an_operation_made_between_two_models_is_no_data() -> None:
    head = nn.Linear(2, 2)
    with watch(encoder := nn.Linear(2, 2)), watch(head):
        z = encoder(torch.zeros(1, 2)) * 0
        finding = fault_of(head, z / z.norm()).finding
    assert (finding.origin, finding.source_module, finding.operation) == ("received", None, "aten.div.Tensor")
