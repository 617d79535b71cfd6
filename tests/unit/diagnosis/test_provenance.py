"""ProvenanceMode: infinities that are meant, memory nobody wrote, and any program: the step that began it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode

from nanwatch.diagnosis import provenance
from nanwatch.diagnosis.experiment import run
from nanwatch.diagnosis.provenance import WriteLog
from support.examined import comment_of, culprit, exponential, look, snapshot_of
from support.toys import Does

INF, NAN = math.inf, math.nan


# Programs of several operations that leave a bad value. A comment marks the one that made it.

MASK = torch.eye(3, dtype=torch.bool)
EMPTY_ROW = torch.tensor([[False, True, True], [True, True, True], [False, False, True]])


def made_of_python(x: Tensor) -> Tensor:
    factor = torch.tensor(NAN)  # culprit aten.lift_fresh.default
    return x * factor


class Passes(TorchFunctionMode):
    """A mode of the user's, a method of which runs the operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, *args, **(kwargs or {}))

    def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)


def under_a_mode(x: Tensor) -> Tensor:
    with Passes():
        return torch.log(-x)  # culprit aten.log.default


def masked_row(x: Tensor) -> Tensor:
    """Softmax made the nan, not the mask that was filled with -inf on purpose."""
    return torch.softmax(x.masked_fill(EMPTY_ROW, -INF), -1) @ x  # culprit aten._softmax.default


def behind_a_mask(x: Tensor) -> Tensor:
    """Elements that were finite beside the masked ones, and are not behind the operation, are its own."""
    large = torch.exp(x.masked_fill(MASK, -INF) * 100)  # culprit aten.exp.default
    return large / large.sum(-1, keepdim=True)


def to_the_sign_of_a_mask(x: Tensor) -> Tensor:
    low = -x.masked_fill(MASK, INF) * 1e30
    low = low * 1e30  # culprit aten.mul.Tensor
    return torch.softmax(low, -1)


def behind_an_older_mask(x: Tensor) -> Tensor:
    """The mask is older than the overflow, and meant."""
    mask = torch.zeros(3, 3).masked_fill(MASK, -INF)
    scores = (x * 1e30) @ (x * 1e30)  # culprit aten.mm.default
    return torch.softmax(scores + mask, -1)


def behind_an_older_inf(x: Tensor) -> Tensor:
    """The nan of the sum is that of the logarithm."""
    large, bad = torch.exp(x * 1000), torch.log(-x)  # culprit aten.log.default
    return torch.cat([large, bad]).sum()


def other_sign(x: Tensor) -> Tensor:
    """One infinity of the other sign than the mask's is enough."""
    return (x - x).masked_fill(MASK, INF) @ -torch.ones(3, 1)  # culprit aten.mm.default


def logarithm_of_counts(x: Tensor) -> Tensor:
    """Zeros and ones choose, other numbers do not."""
    weights = torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 0.0]]).log()  # culprit aten.log.default
    return torch.softmax(x[:2] + weights, -1)


def logarithm_of_zeros(x: Tensor) -> Tensor:
    """Zeros alone do not choose either."""
    weights = torch.tensor([[0.0, 0.0, 0.0]]).log()  # culprit aten.log.default
    return torch.softmax(x + weights, -1)


def unwritten(x: Tensor) -> Tensor:
    """Memory as it was found, with a nan in it, is what was allocated and not written."""
    memory = torch.empty(4)  # culprit aten.empty.memory_format
    memory.numpy()[:] = NAN
    memory[1:3] = x[0, :2]
    return memory * 2


def unwritten_and_made(x: Tensor) -> Tensor:
    """Memory may hold anything: where an operation made a bad value too, that one is named."""
    memory = torch.empty(3)
    memory.numpy()[:] = NAN
    return memory + torch.exp(x * 1000)  # culprit aten.exp.default


def written_out(x: Tensor) -> Tensor:
    """What `out` held before is no operand."""
    memory = torch.log(-x).copy_(torch.log(-x))
    return torch.exp(x * 1000, out=memory)  # culprit aten.exp.out


def to_another_sign_than_a_mask(x: Tensor) -> Tensor:
    """The least number that a mask holds becomes an infinity that masks nothing."""
    high = x.masked_fill(MASK, torch.finfo(x.dtype).min) * -2  # culprit aten.mul.Tensor
    return torch.softmax(high, -1)


def two_at_once(x: Tensor) -> Tensor:
    """Of two that a sum takes in the first began it."""
    first = torch.exp(x * 1000)  # culprit aten.exp.default
    return first + torch.log(x - x)


def of_an_infinite_number(x: Tensor) -> Tensor:
    """An infinity that is written is meant, the nan that it makes is not."""
    return (x - x) * INF  # culprit aten.mul.Tensor


def through_a_sparse_matrix(x: Tensor) -> Tensor:
    """Multiply by inverse degrees, as a graph network does."""
    inverse = 1 / (x[0] - 1)  # culprit aten.reciprocal.default
    return torch.sparse.mm(torch.sparse_coo_tensor(torch.arange(3).expand(2, 3), inverse), x)


def behind_a_higher_order_operator(x: Tensor) -> Tensor:
    x = x[:1, :1].expand(1, 1, 16, 16)
    return torch.log(flex_attention(x, x, x) - 1)  # culprit aten.log.default


FUNCTIONS = [value for value in globals().values() if isinstance(value, FunctionType)]
ABOVE = [value for value in FUNCTIONS if value.__module__ == __name__]


@pytest.mark.parametrize("function", [exponential, *ABOVE], ids=lambda function: function.__name__)
def test_a_known_culprit(function: Callable[[Tensor], Tensor]) -> None:
    """The operation that its author marked is found, with its line."""
    finding, seen = look(Does(function), torch.ones(3, 3))
    assert comment_of(seen.finding) == f"culprit {seen.step.operation}"
    assert (seen.finding.transient, finding.origin) == (False, "produced")
    assert not any("allow=" in remark for remark in seen.finding.remarks)
    is_masked = function in (masked_row, behind_a_mask, to_the_sign_of_a_mask, other_sign)
    assert is_masked or all(record.isfinite for record in seen.step.operands)


def test_what_is_said_of_a_mask_and_of_memory() -> None:
    """Which row is masked throughout, who put the infinities there, and that nobody wrote the memory."""
    _, seen = look(Does(masked_row), torch.ones(3, 3))
    assert seen.finding.extent == "1 of 3 rows, row 1"
    remarks = "\n".join(seen.finding.remarks)
    assert "-inf everywhere along dimension 1 in 1 of 3 rows, the first at [1]" in remarks
    assert "holds -inf that aten.masked_fill.Scalar" in remarks
    _, seen = look(Does(unwritten), torch.ones(3, 3))
    assert "allocated and not written" in seen.finding.remarks[1]


LOWEST = torch.finfo(torch.float32).min
GIVEN = torch.zeros(3, 3).masked_fill(MASK, -INF)
MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "filled": lambda x: x.masked_fill(EMPTY_ROW, -INF),
    "chosen": lambda x: torch.where(EMPTY_ROW, -INF, x),
    "two of the lowest number": lambda x: x + 2 * torch.zeros(3, 3).masked_fill(EMPTY_ROW, LOWEST),
    "added": lambda x: x + torch.zeros(3, 3).masked_fill(EMPTY_ROW, -INF),
    "given, and added in place": lambda x: x.clone().add_(GIVEN).masked_fill(EMPTY_ROW, -INF),
    "logarithm of zeros and ones": lambda x: x + (~EMPTY_ROW).float().log(),
    "filled, and scaled in place": lambda x: x.masked_fill(EMPTY_ROW, -INF).mul_(2),
    "padded": lambda x: nn.functional.pad(x[:2], (0, 0, 0, 1), value=-INF),
}


@pytest.mark.parametrize("kind", MASKS)
def test_ways_to_mask(kind: str) -> None:
    """The softmax over nothing but a mask is the culprit; an overflow beside it is not hidden."""
    _, seen = look(Does(lambda x: torch.softmax(MASKS[kind](x), -1)), torch.zeros(3, 3))
    assert seen.step.operation == "aten._softmax.default"
    assert seen.finding.remarks
    _, seen = look(Does(lambda x: torch.softmax(MASKS[kind](x @ x), -1)), torch.full((3, 3), 1e30))
    assert seen.step.operation == "aten.mm.default"


def test_infinities_in_the_result_that_are_meant() -> None:
    """Scores handed out with their mask: where the -inf was written, and how to allow it."""
    scores = lambda x: x.masked_fill(EMPTY_ROW, -INF).reshape(9) * 2  # noqa: E731 # culprit
    _, seen = look(Does(scores), torch.zeros(3, 3))
    assert (seen.step.operation, str(seen.step.place)) == ("aten.masked_fill.Scalar", culprit(scores))
    assert any("allow='inf:" in remark for remark in seen.finding.remarks)


def test_what_was_there_before_is_meant_if_it_is_a_mask() -> None:
    """A product with 0 makes nan of an additive mask. Another infinity is to blame itself, also in a filled tensor."""
    mask, scale = torch.zeros(3, 3).masked_fill(MASK, -INF), torch.full((3, 3), INF)
    _, seen = look(Does(lambda x, mask: (x + mask) * 0), torch.ones(3, 3), mask)
    assert (seen.step.operation, seen.step.strangers) == ("aten.mul.Tensor", ())
    _, seen = look(Does(lambda x: scale.masked_fill(MASK, -INF) * x), torch.ones(3, 3))
    assert seen.step.operation == "aten.masked_fill.Scalar"
    assert not any("allow=" in remark for remark in seen.finding.remarks)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_choice_is_blamed_on_the_operand_it_took_the_infinity_from(is_first: bool) -> None:
    """The other operand overflowed earlier, but `where` left those elements out."""
    chosen = torch.tensor([True, True, False])

    def forward(x: Tensor) -> Tensor:
        left_out = torch.exp(x)
        taken = torch.exp(x.roll(1))  # culprit
        return torch.where(chosen, taken, left_out) if is_first else torch.where(~chosen, left_out, taken)

    _, seen = look(Does(forward), torch.tensor([1000.0, 1000.0, 1.0]))
    assert (seen.step.operation, str(seen.step.place)) == ("aten.exp.default", culprit(forward))


# The log of writes


@given(
    st.lists(
        # Every eighth writes all of the storage.
        st.tuples(*map(st.sampled_from, ([0, 0, 2, 5], [1, 6, 8, 8], [1, 1, 2, 3], [False, True]))),
        min_size=1,
        max_size=8,
    )
)
def test_the_log_knows_who_wrote_each_element_last(writes: list[tuple[int, int, int, bool]]) -> None:
    """Writes to parts of one storage, the first element of each bad, against a list of who wrote each last."""
    memory, log = torch.zeros(8), WriteLog()
    last: list[int | None] = [None] * 8
    for number, (start, stop, step, is_bad) in enumerate(writes):
        part = slice(start, max(stop, start + 1), step)
        memory[part] = 1.0
        memory[start] = INF if is_bad else 1.0
        log.put(memory[part], number if is_bad else None)
        last[part] = [number if is_bad else None] * len(last[part])
    for _ in range(2):
        for part in (slice(None), slice(2, 5), slice(0, 8, 3), slice(3, 4)):
            bad = [x for x, value in zip(last[part], memory[part].tolist(), strict=True) if math.isinf(value)]
            assert not bad or log.find(memory[part]) == sorted({x for x in bad if x is not None})
        memory.fill_(INF)  # which nobody has seen
    assert log.find(memory[3].expand(2, 5)) == log.find(memory[3:4])


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log keeps the last write to a large storage alone, and a run keeps its first steps alone."""
    monkeypatch.setattr(provenance, "_MOST_BYTES", 8)
    monkeypatch.setattr(provenance, "_MOST_STEPS", 1)
    log, memory = WriteLog(), torch.full((4,), INF)
    for number in range(2):
        log.put(memory[2 * number :][:2], number)
    assert log.find(memory[:2]) == [1]
    seen = run(snapshot_of(Does(lambda x: x.log().exp().log()), (torch.zeros(2),), {}), {}, follows=True)
    assert [step.operation for step in seen.provenance.steps] == ["aten.log.default"]


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b * 1e9,
    "cat": lambda a, b: torch.cat([a[:1], b[1:]]),
    "half": lambda a, b: a * 0.5,
    "view": lambda a, b: a.t(),
    "clean": lambda a, b: a.nan_to_num(1, 2, 3),
    "exp": lambda a, b: a.exp(),
    "mm": lambda a, b: a @ b,
    "add_": lambda a, b: a.add_(b.clone()),
    "copy_": lambda a, b: a.copy_(b.clone()),
    "row": lambda a, b: a[0].copy_(b[1].clone()),
}
STEPS = st.tuples(st.sampled_from([*OPERATIONS]), st.integers(0, 9), st.integers(0, 9))


def run_program(program: list[tuple[str, int, int]], x: Tensor) -> tuple[Tensor, set[str]]:
    """The sum of all tensors, and the names of the steps that made a bad value of two operands that were finite."""
    held, began = [x, x.flip(0)], set()
    for name, i, j in program:
        a, b = held[i % len(held)], held[j % len(held)]
        finite = bool(torch.isfinite(a).all() and torch.isfinite(b).all())
        result = OPERATIONS[name](a, b)
        if name not in ("add_", "copy_", "row"):
            held.append(a := result)
        if finite and not bool(torch.isfinite(a).all()):
            began.add(name)
    return torch.stack(held).mul(1e-9).sum(0), began


@given(st.lists(STEPS, min_size=1, max_size=12))
def test_the_culprit_began_it(program: list[tuple[str, int, int]]) -> None:
    """In any program the operation named had finite operands, and a plain run shows such a step of that name."""
    x = torch.tensor([[1.0, 2.0], [3.0, 40.0]])
    total, began = run_program(program, x.clone())
    if bool(torch.isfinite(total).all()):
        return
    _, seen = look(Does(lambda x: run_program(program, x.clone())[0]), x)
    name = seen.step.operation.split(".")[1]
    assert name in began
    assert all(one.isfinite for one in seen.step.operands)
