"""The cache: tensors are read once, and silent changes are seen soon. The oracle is torch's own reduction."""

import ctypes
import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nanwatch.numerics import _extension
from support.implementations import threads
from support.toys import Does, Own, fault_of, fresh, latest, seen
from support.watching import watch

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder remembers nothing")
NAN = float("nan")
OTHER = torch.optim.SGD([nn.Parameter(torch.ones(1))])


def then(between: Callable[[Tensor], Tensor]) -> nn.Module:
    """Calls a second part on what `between` makes of the output of the first."""
    return Does(lambda first, second, x: second(between(first(x))), nn.Identity(), nn.Identity())


class Table(nn.Module):
    """Several tables of one MiB, of which a call needs a row each."""

    def __init__(self, count: int, *, is_buffer: bool) -> None:
        super().__init__()
        for i in range(count):
            table = torch.full((1 << 12, 64), float(i + 1))
            if is_buffer:
                self.register_buffer(f"table{i}", table)
            else:
                self.register_parameter(f"table{i}", nn.Parameter(table))

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.mark.parametrize("is_buffer", [True, False])
def test_tables_are_read_in_turn_within_the_budget(is_buffer: bool) -> None:
    """Of 12 MiB that change, 4 are read in each batch and 1 of those that wait, in turn; the rest says so."""
    model = Table(12, is_buffer=is_buffer)
    tables = [*model.buffers(), *model.parameters()]
    with watch(model, max_frames=1) as w:
        seen_in = []
        for _ in range(6):
            for table in tables:
                table.detach().mul_(1)
            model(torch.ones(1))
            rows = w.frames[-1].records[:12]
            seen_in.append([i for i, row in enumerate(rows) if row.isfinite])
            unread = {str(row.note) for row in rows if row.isfinite is None}
            assert unread == {"not checked: not read yet"}
    in_turn = [i for places in seen_in for i in places]
    assert sorted(in_turn[:12]) == sorted(in_turn[12:24]) == list(range(12))
    assert max(map(len, seen_in)) <= 6
    assert len(in_turn) <= 6 * 5


def test_a_failing_call_is_read_whole() -> None:
    """Whatever the budget says: the table that is not finite is found."""
    model = Table(12, is_buffer=False)
    model.table11.data[5, 5] = NAN
    model.forward = lambda x: x * model.table11[5].sum()  # type: ignore[method-assign]
    with watch(model, rerun=False):
        assert fault_of(model, torch.ones(1)).finding.label == "table11"


def test_a_mask_is_recognised_once() -> None:
    """It is not read again while it is unchanged, under any label, and judged anew when it changes."""
    mask = torch.full((8, 8), -torch.inf).triu(1)
    model = nn.ModuleList(Does(lambda x, bias: x + bias.clamp(min=0)) for _ in range(2))
    with watch(model, on_nonfinite="record", rerun=False) as w:
        for _ in range(3):
            model[0](torch.ones(8, 8), mask)
            model[1](torch.ones(8, 8), bias=mask)
        rows = [
            row for frame in w.frames for row in frame.records if row.label in ("input[1]", "input[bias]")
        ]
        assert (len(rows), {str(row.note) for row in rows}) == (6, {"mask"})
        assert w.counters["cache_hits"] >= 5
        mask[3, 3] = NAN
        model[0](torch.ones(8, 8), mask)
        finding = w.report().finding
    assert finding.label == "input[1]"


@pytest.mark.parametrize("how", ["fused", "foreach", "plain"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_weights_are_current_after_an_optimizer_step(kind: type[Any], how: str) -> None:
    """No cache hit is stale over training steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    arguments = {} if how == "plain" else {how: True}
    optimizer = kind(model.parameters(), lr=0.1, **arguments)
    with watch(model, verify_hits=True) as w:
        for _ in range(4):
            model(torch.randn(3, 4)).square().sum().backward()
            for name in ("0", "2"):
                assert seen(w, "weight", name) == fresh(model.get_submodule(name).weight)
            optimizer.step()
            optimizer.zero_grad()
        assert w.counters["stale_hits"] == 0


WITH_A_SIGN: dict[str, Callable[[Own], object]] = {
    "in-place operation": lambda m: torch.no_grad()(m.weight.mul_)(3),
    "write to a view": lambda m: torch.no_grad()(m.weight[0].fill_)(50.0),
    "foreach on parameters": lambda m: torch.no_grad()(torch._foreach_mul_)([m.weight], 3.0),
    "load_state_dict, assign": lambda m: m.load_state_dict({"weight": torch.full((2, 3), 9.0)}, assign=True),
    "new parameter": lambda m: setattr(m, "weight", nn.Parameter(torch.full((4,), 9.0))),
    "new data": lambda m: setattr(m.weight, "data", torch.full((2, 3), 9.0)),
    "half": lambda m: m.half(),
    "set_": lambda m: torch.no_grad()(m.weight.set_)(torch.full((7,), 9.0)),
    "resize_": lambda m: m.weight.requires_grad_(False).resize_(1, 2),
    "swap_tensors": lambda m: torch.utils.swap_tensors(m.weight, nn.Parameter(torch.full((2,), 9.0))),
    "view of another part": lambda m: setattr(m.weight, "data", m.weight.data[1:]),
}


def fused_sgd(p: Tensor) -> None:
    """Call the kernel of a fused optimizer's step, without an optimizer and its hooks."""
    rest = dict.fromkeys(("weight_decay", "momentum", "dampening"), 0.0)
    rest |= dict.fromkeys(("nesterov", "maximize", "is_first_step"), False)
    with torch.no_grad():
        torch._fused_sgd_([p], [torch.ones_like(p)], [], lr=-9.0, **rest)


# `.data`, arrays and storages share the memory and not the version counter, which kernels need not count up.
WITHOUT_A_SIGN: dict[str, Callable[[Tensor], object]] = {
    "data.copy_": lambda p: p.data.copy_(torch.full((2, 3), 9.0)),
    "foreach on data": lambda p: torch._foreach_copy_([p.data], [torch.full((2, 3), 9.0)]),
    "numpy": lambda p: np.copyto(p.detach().numpy(), 9.0),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).fill_(9.0),
    "set_data of storage": lambda p: torch.empty(0).set_(p.untyped_storage()).fill_(9.0),
    "data_ptr": lambda p: ctypes.memset(p.data_ptr(), 0x41, 4 * p.numel()),
    "fused kernel by hand": fused_sgd,
}


@pytest.mark.parametrize("write", WITH_A_SIGN.values(), ids=WITH_A_SIGN)
def test_a_write_that_leaves_a_sign_is_seen_at_once(write: Callable[[Own], object]) -> None:
    """A write that bumps the version or changes tensor, storage or layout is in the very next frame."""
    model = Own()
    with watch(model) as w:
        for _ in range(2):
            model(torch.ones(1))
        before = latest(w, "weight")
        write(model)
        model(torch.ones(1))
        assert latest(w, "weight") != before
        assert seen(w, "weight") == fresh(model.weight)
        assert latest(w, "weight").shape == tuple(model.weight.shape)
        assert latest(w, "weight").dtype == str(model.weight.dtype).removeprefix("torch.")


@pytest.mark.parametrize("write", WITHOUT_A_SIGN.values(), ids=WITHOUT_A_SIGN)
def test_a_write_without_a_sign_is_seen_at_the_next_rereading(write: Callable[[Tensor], object]) -> None:
    """A write past the version counter is not in the next frame, but within 64 batches it is."""
    model = Own()
    with watch(model) as w:
        model(torch.ones(1))
        before = fresh(model.weight)
        write(model.weight)
        assert fresh(model.weight) != before
        found = []
        for _ in range(80):
            model(torch.ones(64))
            found.append(seen(w, "weight"))
    assert found[0] == before, "seen at once now: move this write to the others, and tell the docs"
    assert found[-1] == fresh(model.weight)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_write_without_a_sign_is_seen_after_a_step(is_own: bool) -> None:
    """After the step of an optimizer that has the weight, or has none that is known, as one with copies."""
    model = Own()
    optimizer = torch.optim.SGD(model.parameters() if is_own else [nn.Parameter(torch.ones(1))], lr=0.0)
    with watch(model) as w:
        for _ in range(3):
            model(torch.ones(1))
        fused_sgd(model.weight)
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        model(torch.ones(1))
        assert seen(w, "weight") == fresh(model.weight)


@pytest.mark.parametrize("calls", [1, 2], ids=["called once", "called twice in a batch"])
def test_running_statistics_are_current_in_training(calls: int) -> None:
    """BatchNorm moves its statistics past the version counter: in training they are read at every call."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(*[norm] * calls)
    current: list[tuple[float, float]] = []
    norm.register_forward_hook(lambda module, *_: current.append(fresh(module.running_var)))
    with watch(model, max_frames=100, verify_hits=True) as w:
        for _ in range(5):
            model(torch.randn(6, 3))
        model.eval()
        for _ in range(2):
            model(torch.randn(6, 3))
    frames = [frame for frame in w.frames if frame.class_name == "BatchNorm1d"]
    found = [(r.abs_min, r.abs_max) for frame in frames for r in frame.records if r.label == "running_var"]
    assert (found, w.counters["stale_hits"]) == (current, 0)


def test_freed_activations_are_not_taken_for_their_successors() -> None:
    """Under no_grad outputs get the address and id of freed ones; no range of the dead is served for the living."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(50)]).eval()
    identities: list[tuple[int, int]] = []
    ranges: list[tuple[float, float]] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        identities.append((id(output), output._version))
        ranges.append(fresh(output))

    for module in model:
        module.register_forward_hook(note)
    with watch(model, max_frames=51, verify_hits=True) as w, torch.no_grad():
        model(torch.randn(2, 4))
    # The allocator decides whether the address of the data comes again too.
    assert len(set(identities)) < 25, "nothing collides here: the test shows nothing"
    found = [(r.abs_min, r.abs_max) for frame in w.frames[:-1] for r in frame.records if r.role == "output"]
    assert (found, w.counters["stale_hits"]) == (ranges, 0)


IN_BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "mul_": lambda x: x.mul_(3),
    "index_put_": lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(50.0)),
    "write to a view": lambda x: (x[0].fill_(50.0), x)[1],
    "view": lambda x: x[1:],
    "transposed": lambda x: x.t_(),
    "resize_": lambda x: x.resize_(1, 1),
    "set_": lambda x: x.set_(torch.full((2,), 50.0)),
    "new data": lambda x: (setattr(x, "data", torch.full((2,), 50.0)), x)[1],
    "dtype view": lambda x: x.view(torch.int32),
}


@pytest.mark.parametrize("between", IN_BETWEEN.values(), ids=IN_BETWEEN)
def test_an_activation_changed_between_two_modules_is_read_again(between: Any) -> None:
    """In-place operations, views and new storage between two calls: the second frame has the new range."""
    model = then(between)
    x = torch.arange(1.0, 7.0).reshape(2, 3)
    with watch(model, verify_hits=True) as w:
        output = model(x)
    assert seen(w, "input[0]", "parts.1") == seen(w, "output", "parts.1") == fresh(output)
    assert latest(w, "output", "parts.1").shape == tuple(output.shape)
    assert w.counters["stale_hits"] == 0


def test_tensors_without_a_version_counter_are_read_each_time() -> None:
    """Nothing signals a change of a tensor made in inference mode: no hit, and every range is current."""
    with torch.inference_mode():
        model = nn.Sequential(Own(), then(lambda x: (x.data.mul_(3), x)[1]))
        model[0].weight = nn.Parameter(torch.ones(2), requires_grad=False)
        assert model[0].weight.is_inference()
        with watch(model) as w:
            for batch in range(3):
                model[0].weight.mul_(2)
                output = model(torch.ones(2))
                assert seen(w, "weight", "0") == (2.0 ** (batch + 1), 2.0 ** (batch + 1))
                assert seen(w, "input[0]", "1.parts.1") == fresh(output) == (3.0, 3.0)
    assert w.counters["cache_hits"] == 0


def test_nothing_grows_over_many_batches() -> None:
    """After 10,000 batches: no more labels, weights or Python memory than after 2,000, and max_frames frames."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.randn(1, 2)

    def run(batches: int) -> tuple[int, int, int]:
        with torch.no_grad():
            for _ in range(batches):
                model(x)
        gc.collect()
        counters = w.counters
        return tracemalloc.get_traced_memory()[0], counters["labels"], counters["weights_remembered"]

    tracemalloc.start()
    try:
        with watch(model) as w:
            memory, labels, weights = run(2_000)
            later = run(8_000)
            assert later[1:] == (labels, weights)
            assert later[0] - memory < 16_000  # 2 bytes a batch
            assert (w.batch, len(w.frames)) == (9_999, 21)
    finally:
        tracemalloc.stop()
    assert (labels, weights) == (8, 2)  # labels of five values and three classes


def write(x: Tensor) -> None:
    """Make the element nan that was read first."""
    with torch.no_grad():
        x[0, 0] = NAN


def write_past_the_counter(x: Tensor) -> None:
    """The same as fused optimizers do it: the step's hook is the only sign."""
    x.data[0, 0] = NAN
    OTHER.step()


@contextmanager
def during_the_read(module: nn.Module, act: Callable[[], object]) -> Iterator[None]:
    """Inside, another thread acts once while the recorder reads what belongs to the first call of the module.

    The recorder looks at the call after the user's hooks, and lets other threads run only while it reads: they get no
    other turn.
    """
    called = threading.Event()
    thread = threading.Thread(target=lambda: called.wait() and act())
    before = sys.getswitchinterval()
    thread.start()
    handle = module.register_forward_hook(lambda *_: called.set())
    sys.setswitchinterval(60)
    try:
        with threads(1):
            yield
    finally:
        sys.setswitchinterval(before)
        handle.remove()
        called.set()
        thread.join()


@pytest.mark.parametrize("write", [write, write_past_the_counter])
def test_a_weight_written_while_it_is_read_is_read_again(write: Callable[[Tensor], None]) -> None:
    """The range is that of the version before: a later batch, when the weight has its turn, has the nan."""
    OTHER.step()  # the first one takes long
    model = Own()
    # Each of 2^15 ones is read 4,096 times: some 50 ms of reading in 128 KiB of memory.
    long_to_read = torch.ones(1 << 15).as_strided((1 << 14, 1 << 14), (1, 1))
    model.weight = nn.Parameter(long_to_read, requires_grad=False)
    with watch(model, on_nonfinite="record") as w:
        with during_the_read(model, lambda: write(model.weight)):
            model(torch.ones(1))
        # A weight that does not fit has 1 MiB from each batch in which it waits.
        num_batches = model.weight.numel() * 4 >> 20
        batches = (model(torch.ones(1)) for _ in range(num_batches))
        assert any(latest(w, "weight").isfinite is False for _ in batches)
