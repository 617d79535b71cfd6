"""find_operation: the re-run is as the first was, and nothing notices it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.diagnosis.batch_snapshot import BatchSnapshot
from nanwatch.diagnosis.diagnosis import Diagnosis
from nanwatch.diagnosis.search import find_operation
from support.examined import Does, culprit, exponential, look
from support.spy import Spy
from support.watching import watch

INF, NAN = math.inf, math.nan


# A re-run


def test_dropout_that_decides() -> None:
    """The random state of the batch's start is put back: the same elements are dropped, the same one overflows."""

    def forward(dropout: nn.Module, x: Tensor) -> Tensor:
        kept = dropout(x)
        return 1 / kept  # culprit

    model = Does(forward, nn.Dropout(0.5))
    x = torch.ones(64)
    start = BatchSnapshot.capture(model, (x,), {})
    with watch(model, on_nonfinite="record") as w:
        y = model(x)
    finding = w.report().finding
    torch.rand(3)
    before = torch.get_rng_state()
    assert finding is not None
    seen = find_operation(start, finding, model=model)
    assert torch.equal(torch.get_rng_state(), before)
    assert seen.operation == "aten.mul.Tensor" or seen.operation == "aten.reciprocal.default"
    assert seen.index == (int(y.isinf().nonzero()[0]),)


def state_of(model: nn.Module) -> list[Any]:
    """All that a re-run could leave behind."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(name, id(x), x._version, x.tolist()) for name, x in tensors],
        [(sorted(module.__dict__), module.training) for module in model.modules()],
        [list(module._forward_hooks) + list(module._forward_pre_hooks) for module in model.modules()],
        torch.get_rng_state().tolist(),
        (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()),
    ]


def test_nothing_is_left_behind() -> None:
    """Weights, buffers, their versions, flags, hooks, attributes and random states are as before."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.norm = nn.BatchNorm1d(3)
            self.dropout = nn.Dropout(0.5)
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.train(not self.training)
            return self.dropout(self.linear(self.norm(x))) / 0

    model = Counting().train()
    x = torch.randn(4, 3)
    with watch(model, on_nonfinite="record") as w:
        start = BatchSnapshot.capture(model, (x,), {})
        model(x)
        finding = w.report().finding
        assert finding is not None
        before = state_of(model)
        w.pause()
        seen = find_operation(start, finding, model=model)
        assert state_of(model) == before
    assert seen.operation == "aten.div.Tensor"


def test_hooks_of_the_user_run_and_see_nothing_new() -> None:
    """A hook may make the bad value, and what hooks are called with is what they always are."""
    given = Spy()

    def hook(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        given.add([type(module).__name__, len(args), len(module._forward_hooks)])
        return result / 0  # culprit

    part = nn.Identity()
    part.register_forward_hook(hook)
    finding, seen = look(nn.Sequential(part), torch.ones(2))
    assert (finding.module, seen.operation, seen.source) == ("0", "aten.div.Tensor", culprit(hook))
    assert given.values == [["Identity", 1, 1]] * 2


def test_a_generator_that_was_consumed() -> None:
    """An iterator among the arguments is empty the second time: nothing is concluded, and it is said why."""
    model = Does(lambda batches: sum(x / 0 for x in batches) + torch.ones(2))
    _, seen = look(model, (x for x in [torch.ones(2)]))
    assert seen.transient is None
    assert any("iterator" in one for one in seen.remarks)


def test_an_input_that_was_changed_in_place() -> None:
    """The re-run starts from what the first left, which is said, and leaves the input as it finds it."""

    def forward(x: Tensor) -> Tensor:
        x.sub_(1)
        return 1 / x

    x = torch.ones(2)
    _, seen = look(Does(forward), x)
    assert x.tolist() == [0, 0]
    assert seen.transient is None
    assert any("written to, in place" in one for one in seen.remarks)


@pytest.mark.parametrize("container", [lambda x: [x], lambda x: (x,), lambda x: {"x": x}])
def test_a_nested_input_that_was_changed_in_place(container: Callable[[Tensor], Any]) -> None:
    """A write in place is noticed in a list, a tuple and a dict too."""

    def forward(nested: Any) -> Tensor:
        x = nested["x"] if isinstance(nested, dict) else nested[0]
        x.sub_(1)
        return 1 / x

    x = torch.ones(2)
    _, seen = look(Does(forward), container(x))
    assert x.tolist() == [0, 0]
    assert seen.transient is None
    assert any("] was written to, in place" in one for one in seen.remarks)


def test_a_call_that_writes_to_what_it_is_given() -> None:
    """The arguments of the guilty call are no longer what they were, and that is said."""

    def spoil(x: Tensor) -> Tensor:
        x.add_(1)
        return x / 0

    _, seen = look(Does(lambda part, x: part(x * 2), Does(spoil)), torch.ones(2))
    assert any(one.startswith("the call wrote to its input[0]") for one in seen.remarks)


def test_a_failure_that_does_not_come_again() -> None:
    """A value that the re-run does not make was transient."""
    times = iter([NAN, 1.0])
    _, seen = look(Does(lambda x: x * next(times)), torch.ones(2))
    assert seen == Diagnosis(transient=True)


def test_a_second_run_that_raises() -> None:
    """Its error is told, not raised; the place of the calls is given back."""
    times = iter([1.0])
    model = Does(lambda x: x / 0 * next(times))
    _, seen = look(model, torch.ones(2))
    assert (seen.transient, seen.operation) == (None, None)
    assert any("StopIteration" in one for one in seen.remarks)
    assert model._compiled_call_impl is None


def test_an_interrupt_is_not_held_up() -> None:
    """The user's Ctrl-C in the re-run ends it."""
    runs: list[int] = []

    def forward(x: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) > 1:
            raise KeyboardInterrupt
        return x / 0

    model = Does(forward)
    with pytest.raises(KeyboardInterrupt):
        look(model, torch.ones(2))
    assert model._compiled_call_impl is None


def test_an_error_after_the_bad_value() -> None:
    """Findings made before the re-run raised are kept."""
    runs: list[int] = []

    def forward(part: nn.Module, x: Tensor) -> Tensor:
        y = part(x)
        runs.append(1)
        if len(runs) > 1:
            raise RuntimeError("not again")
        return y

    _, seen = look(Does(forward, Does(exponential)), torch.ones(2))
    assert (seen.operation, seen.transient) == ("aten.exp.default", False)


def test_gradients_of_a_call_under_way() -> None:
    """Examined from the middle of the user's forward, it changes no gradient, bit for bit."""

    def forward(linear: nn.Module, norm: nn.Module, bad: nn.Module, x: Tensor) -> Tensor:
        y = norm(linear(x))
        z = bad(y)
        return y * torch.tanh(linear(y)) + z.detach().nan_to_num(0, 0, 0)

    def model() -> nn.Module:
        torch.manual_seed(0)
        bad = Does(lambda dropout, x: dropout(x) / 0, nn.Dropout(0.5))
        return nn.Sequential(Does(forward, nn.Linear(3, 3), nn.BatchNorm1d(3).eval(), bad))

    x = torch.randn(4, 3)
    gradients = []
    for examined in (False, True):
        net = model()
        torch.manual_seed(1)
        start = BatchSnapshot.capture(net, (x,), {})
        seen: list[Diagnosis] = []
        with watch(net, on_nonfinite="record", act_at="module") as w:

            def hook(*_: Any, net: nn.Module = net, w: Any = w, start: Any = start, seen: Any = seen) -> None:
                if seen or w.report().finding is None:
                    return
                w.pause()
                seen.append(Diagnosis())
                seen[0] = find_operation(start, w.report().finding, model=net)
                w.resume()

            if examined:
                net[0].parts[0].register_forward_hook(hook)
            loss = net(x).square().sum()
            loss.backward()
        if examined:
            assert seen[0].operation == "aten.div.Tensor"
        gradients.append([p.grad for p in net.parameters()] + [torch.get_rng_state()])
    for one, other in zip(*gradients, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_autocast_is_as_it_was() -> None:
    """Overflow in float16 under autocast, examined outside of it."""

    def forward(x: Tensor) -> Tensor:
        return torch.mm(x, x)  # culprit

    model = Does(forward)
    x = torch.full((4, 4), 300.0)
    with torch.autocast("cpu", torch.float16), watch(model, on_nonfinite="record") as w:
        start = BatchSnapshot.capture(model, (x,), {})
        model(x)
    finding = w.report().finding
    assert finding is not None
    seen = find_operation(start, finding, model=model)
    assert (seen.operation, seen.source) == ("aten.mm.default", culprit(forward))
    assert [one.dtype for one in seen.operands] == ["float16", "float16"]
    assert seen.extent == "all"


def test_inference_mode() -> None:
    """A batch in inference mode is run again in it."""
    with torch.inference_mode():
        finding, seen = look(Does(exponential), torch.ones(2))
    assert (seen.operation, finding.origin) == ("aten.exp.default", "produced")
