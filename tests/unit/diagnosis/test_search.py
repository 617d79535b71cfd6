"""find_operation: the operation, line and operands that made a bad value, of models whose culprit is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from nanwatch.diagnosis.data import describe
from nanwatch.diagnosis.experiment import run
from nanwatch.diagnosis.search import find_operation
from nanwatch.instrumentation.wrapped_names import module_names
from nanwatch.report.report import Report
from nanwatch.session.api import watch
from support.examined import culprit, exponential, look, snapshot_of
from support.spy import Spy
from support.toys import Does, fault_of

INF, NAN = math.inf, math.nan


def test_operands_are_what_the_operation_was_given() -> None:
    """Labels, shapes and ranges as they were before an operation in place, and zeros and subnormals of a divisor."""
    _, seen = look(Does(lambda x: x.mul(1e20).mul_(1e20)), torch.tensor([[1.0, 2.0, 3.0]]))
    (given,) = seen.step.operands
    assert (given.label, given.role, given.shape, given.dtype) == ("operand[0]", "input", (1, 3), "float32")
    assert given.abs_max == pytest.approx(3e20)
    assert "aten.mul_.Tensor was given the number other = 1e+20" in seen.finding.remarks
    _, seen = look(Does(lambda x: x / torch.tensor([0.0, 0.0, 1.0, 1e-39])), torch.ones(4))
    counts = [(x.health.num_zero, x.health.num_subnormal) for x in seen.step.operands if x.health]
    assert counts == [(0, 0), (2, 1)]
    assert "2 zero, 1 subnormal)" in Report((), seen.finding, 0).to_text()


def test_an_operation_of_torch_alone_has_no_place_and_the_index_is_of_the_first_run() -> None:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.constant_(linear.weight, 1e30)
    with torch.inference_mode():  # whose tensors have no version
        finding, seen = look(linear, x := torch.tensor([[1.0], [1e30]]))
    assert (seen.step.operation, seen.step.place) == ("aten.linear.default", None)
    assert finding.index == seen.finding.index == (1, 0)
    seen = find_operation(snapshot_of(linear, (x,), {}), replace(finding, index=(0, 0)), model=linear)
    assert seen.finding.index == (0, 0)


def by_numpy(x: Tensor) -> Tensor:
    x = x.clone()
    x.numpy()[:, 1] = NAN
    return x


def test_a_value_from_numpy_has_no_operation_and_a_row_of_a_batch_no_number() -> None:
    _, seen = look(Does(by_numpy), torch.ones(2, 2, 3))
    assert (seen.step, seen.finding.extent) == (None, "2 of 4 rows")
    assert any("no operation that goes through PyTorch's dispatcher" in x for x in seen.finding.remarks)
    _, seen = look(Does(lambda x: x / x), torch.tensor([0.0, 1.0])[:, None, None].expand(2, 1, 3))
    assert seen.finding.extent == "1 of 2 rows"


def test_an_operand_that_was_nan_before_has_no_cure() -> None:
    """A change that puts 0 in place of a product with nan would hide a tensor that is destroyed."""

    scale = torch.tensor([1.0, NAN])
    model = Does(lambda x: x * scale)
    with watch(model):
        finding = fault_of(model, torch.zeros(2)).finding
    assert (finding.operation, finding.cures) == ("aten.mul.Tensor", ())
    assert "operand[1] was not finite before, and no operation that was seen wrote it" in finding.remarks


# Without a re-run


def test_a_weight_a_buffer_and_data() -> None:
    """Described where they are; nothing is run."""
    calls = []
    model = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.Linear(3, 4))
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model[1].weight[2] = NAN
    finding = look(model, torch.ones(2, 3))[1].finding
    assert (finding.extent, finding.index, finding.transient) == ("1 of 4 rows, row 2", (2, 0), None)
    model = nn.Sequential(nn.BatchNorm1d(3).eval())
    model[0].running_var[1] = INF
    finding, seen = look(model, torch.ones(2, 3))
    assert (finding.origin, seen.finding.extent) == ("buffer", "one element")
    model = nn.Sequential(nn.Linear(3, 4))
    x = torch.ones(2, 3)
    x[:, 1] = NAN
    finding, seen = look(model, x)
    assert (finding.origin, seen.finding.extent) == ("data", "column 1")
    assert (seen.finding.remarks, len(calls)) == (("`input` came in with 2 nan: column 1",), 1)
    assert describe(x[:1, :1].expand(1 << 50, 3)) == ""  # a bool for each would need 3 PiB


def turned(x: Tensor) -> Tensor:
    y = (x + 1) * 2
    return y - y  # culprit


def multiplied(x: Tensor) -> Tensor:
    y = x + 1
    y = y * 2  # culprit
    return y + 1


def squashed(x: Tensor) -> Tensor:
    y = x * 2  # culprit
    return torch.sigmoid(y * torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("function", [turned, multiplied, squashed], ids=lambda one: one.__name__)
def test_the_operation_that_spreads_bad_data(function: Callable[[Tensor], Tensor]) -> None:
    """The one that makes nan of inf, else a product, which should have masked it, and not the first.

    The backward of what squashes it makes nan of it, and is not run.
    """
    for value in (INF, NAN) if function is multiplied else (INF,):
        finding, seen = look(Does(function), torch.tensor([1.0, value]))
        assert (finding.origin, str(seen.step.place)) == ("data", culprit(function))


def test_the_tensor_inside_a_quantized_weight_is_named() -> None:
    """An int8 weight has a scale for each row, and that of one row is nan."""
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with watch(model):
        finding = fault_of(model, torch.ones(2, 64)).finding
    assert (finding.module, finding.label, finding.origin) == ("0", "weight.scale", "weight")
    assert not finding.cures


def test_the_weight_of_a_module_that_is_not_called_is_named() -> None:
    """No call of its owner reads it: the re-run finds whose memory the product was given."""
    unused, part = nn.Linear(2, 2), nn.Linear(2, 2)
    with torch.no_grad():
        unused.weight[0, 0] = part.weight[1] = NAN
    finding, seen = look(Does(lambda _, part, x: x @ part.weight.t(), unused, part), torch.ones(2))
    assert (finding.module, finding.origin, finding.remarks) == ("", "produced", seen.finding.remarks[:1])
    finding = seen.finding
    assert (finding.module, finding.label, finding.origin) == ("parts.1", "weight", "weight")
    assert (finding.index, finding.extent) == ((1, 0), "1 of 2 rows, row 1")


def test_no_tensor_is_kept() -> None:
    """While a call is examined its intermediate tensors, the bad ones too, die when the forward lets go of them."""
    memory = Spy()

    def forward(x: Tensor) -> Tensor:
        held = []
        for _ in range(5):
            x = x * 1e38
            held.append(StorageWeakRef(x.untyped_storage()))
            memory.add(sum(not one.expired() for one in held))
        return x

    _, seen = look(Does(forward), torch.ones(2))
    assert seen.step.operation == "aten.mul.Tensor"
    # While a product is made its operand lives: afterwards there is one, in either run.
    assert memory.values == [1] * 10


def test_an_output_that_a_users_hook_refused() -> None:
    """Such a hook raises in the re-run too, before the call returns. The output that it left is looked at."""

    def refuse(_: nn.Module, __: Any, output: Tensor) -> None:
        if not output.isfinite().all():
            raise FloatingPointError

    model = Does(lambda part, x: part(x), Does(exponential))
    model.parts[0].register_forward_hook(refuse)
    start = snapshot_of(model, (torch.ones(2),), {})
    with watch(model, on_nonfinite="record") as w, pytest.raises(FloatingPointError):
        model(torch.ones(2))
    seen = find_operation(start, w.report().finding, model=model)
    assert (str(seen.step.place), seen.finding.transient) == (culprit(exponential), False)
    calls = [[record.label for record in call.records] for call in run(start, module_names(model)).calls]
    assert calls == [["input[0]", "output"], ["input[0]"]]


def test_the_value_of_the_finding_is_sought_and_no_other() -> None:
    """A module that is ignored, or an input that is not read, has a nan that is taken out behind it."""
    overflows = Does(lambda x: torch.exp(x.nan_to_num() + 1000))
    logs = Does(lambda x: torch.log(-x))
    within = Does(lambda first, last, x: last(first(x).nan_to_num()), logs, overflows)
    before = Does(lambda last, x: last(torch.log(-x)), overflows)
    for model, options in (within, {"ignore_modules": "parts.0"}), (before, {"read": "outputs"}):
        with watch(model, **options):
            assert fault_of(model, torch.ones(2)).finding.operation == "aten.exp.default"


def test_a_cache_that_the_model_fills_and_a_forward_that_needs_a_graph() -> None:
    """The call has made the bad value in what it was given. Without a graph no tensor takes a hook."""
    fills = lambda x, cache: cache[0].copy_(torch.log(-x))  # noqa: E731
    finding, seen = look(Does(fills), torch.ones(2), [torch.zeros(2)])
    assert (finding.origin, seen.finding.origin) == ("data", "produced")
    hooked = lambda linear, x: (linear(x).register_hook(torch.neg), x / 0)[1]  # noqa: E731
    _, seen = look(Does(hooked, nn.Linear(2, 2)), torch.ones(2))
    assert (seen.step.operation, seen.finding.transient) == ("aten.div.Tensor", False)


def test_a_nan_among_infinities_that_are_allowed() -> None:
    """Calls whose infinities are allowed are passed over; the one with the nan is examined."""
    part = Does(lambda x: x / (x - 1))
    model = Does(lambda part, x: part(x * 0) + part(x) + part(x * torch.tensor(INF)), part)
    start = snapshot_of(model, (torch.ones(2),), {})
    allow, read = ["inf:parts.0", "inf:(root)"], "weights buffers outputs"
    with watch(model, on_nonfinite="record", allow=allow, read=read) as w:
        model(torch.ones(2))
    finding = w.report().finding
    assert finding is not None
    seen = find_operation(start, finding, model=model, allows=w._reports.excuses)
    assert (finding.value, seen.call.args[0].tolist()) == ("nan", [INF, INF])


# A re-run that proves nothing


def test_what_an_earlier_run_has_written_is_that_of_its_last_write() -> None:
    """A second run begins with the nan, and all operations on the tensor are given it."""
    with watch(model := Does(lambda x: x.sub_(1).div_(x))):
        finding = fault_of(model, torch.ones(2)).finding
    assert (finding.origin, finding.label, finding.operation) == ("produced", "input[0]", "aten.div_.Tensor")


def test_a_call_that_writes_to_what_it_is_given() -> None:
    """The arguments of the guilty call are no longer what they were, and that is said. A container's prove nothing."""
    _, seen = look(Does(lambda part, x: part(x * 2), Does(lambda x: x.add_(1) / 0)), torch.ones(2))
    assert any(one.startswith("the call wrote to its input[0]") for one in seen.finding.remarks)
    _, seen = look(Does(lambda nested: 1 / nested["x"].sub_(1)), {"x": (x := torch.ones(2))})
    assert (x.tolist(), seen.finding.transient) == ([0, 0], None)
    assert any("] was written to, in place" in one for one in seen.finding.remarks)


def test_a_failure_that_does_not_come_again_or_whose_second_run_raises() -> None:
    """A value that the re-run does not make was transient, if its module was called. An error is told."""
    times = iter([NAN, 1.0])
    finding, seen = look(Does(lambda part, x: part(x), Does(lambda x: x * next(times))), torch.ones(2))
    assert seen == (replace(finding, transient=True), None, None, None)
    runs = iter([True, False])
    _, seen = look(Does(lambda part, x: part(x) if next(runs) else x, Does(exponential)), torch.ones(2))
    assert seen.finding.transient is None
    assert "the re-run did not call parts.0" in seen.finding.remarks
    times = iter([1.0])
    model = Does(lambda x: x / 0 * next(times))
    _, seen = look(model, torch.ones(2))
    assert (seen.finding.transient, seen.step) == (None, None)
    assert any("StopIteration" in one for one in seen.finding.remarks)
    assert model._compiled_call_impl is None


def test_a_value_is_followed_through_sharded_tensors() -> None:
    """As in tensor parallelism, here on one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def forward(x: Tensor) -> Tensor:
            y = distribute_tensor(x, mesh, [Shard(0)])
            return (torch.log(y - 2) * 3).full_tensor()  # culprit

        _, seen = look(Does(forward), torch.ones(2, 3))
    finally:
        torch.distributed.destroy_process_group()
    assert (seen.step.operation, str(seen.step.place)) == ("aten.log.default", culprit(forward))
