"""ProvenanceMode: infinities that are meant, memory nobody wrote, and any program: the step that began it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from nanwatch.diagnosis.operation import StorageWriteLog
from support.examined import culprit, look
from support.toys import Does

INF, NAN = math.inf, math.nan


# Infinities that are meant


def masked(mask: Tensor, scores: Tensor) -> Tensor:
    """Attention weights with a boolean mask: True is left out."""
    scores = scores.masked_fill(mask, -INF)
    weights = torch.softmax(scores, -1)  # culprit
    return weights @ torch.ones(scores.shape[-1], 2)


EMPTY_ROW = torch.tensor([[False, True, True], [True, True, True], [False, False, True]])


def test_a_row_that_is_masked_everywhere() -> None:
    """Softmax made the nan, not the mask that was filled with -inf on purpose; which row is said."""
    _, seen = look(Does(lambda x: masked(EMPTY_ROW, x)), torch.zeros(3, 3))
    assert (seen.step.operation, str(seen.step.place)) == ("aten._softmax.default", culprit(masked))
    assert seen.extent == "1 of 3 rows, row 1"
    assert any(
        "-inf everywhere along dimension 1 in 1 of 3 rows, the first at [1]" in one for one in seen.remarks
    )
    assert any("holds -inf that aten.masked_fill.Scalar" in one for one in seen.remarks)


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "filled": lambda x: x.masked_fill(EMPTY_ROW, -INF),
    "chosen": lambda x: torch.where(EMPTY_ROW, -INF, x),
    "added": lambda x: x + torch.zeros(3, 3).masked_fill(EMPTY_ROW, -INF),
    "logarithm of zeros and ones": lambda x: x + (~EMPTY_ROW).float().log(),
    "filled, and scaled in place": lambda x: x.masked_fill(EMPTY_ROW, -INF).mul_(2),
    "padded": lambda x: nn.functional.pad(x[:2], (0, 0, 0, 1), value=-INF),
}


@pytest.mark.parametrize("kind", MASKS)
def test_ways_to_mask(kind: str) -> None:
    """However the -inf came there: the softmax over nothing but it is the culprit."""
    _, seen = look(Does(lambda x: torch.softmax(MASKS[kind](x), -1)), torch.zeros(3, 3))
    assert seen.step.operation == "aten._softmax.default"
    assert seen.remarks


@pytest.mark.parametrize("kind", MASKS)
def test_an_overflow_beside_a_mask(kind: str) -> None:
    """A mask in the same tensor does not hide the overflow, and the overflow is the culprit."""

    def forward(x: Tensor) -> Tensor:
        scores = torch.mm(x * 1e30, x * 1e30)  # culprit
        return torch.softmax(MASKS[kind](scores), -1)

    _, seen = look(Does(forward), torch.ones(3, 3))
    assert (seen.step.operation, str(seen.step.place)) == ("aten.mm.default", culprit(forward))


def test_an_overflow_behind_a_mask() -> None:
    """Elements that were finite beside the masked ones, and are not behind the operation, are its own."""

    def forward(x: Tensor) -> Tensor:
        scores = x.masked_fill(torch.eye(3, dtype=torch.bool), -INF)
        large = torch.exp(scores * 100)  # culprit
        return large / large.sum(-1, keepdim=True)

    _, seen = look(Does(forward), torch.ones(3, 3))
    assert (seen.step.operation, str(seen.step.place)) == ("aten.exp.default", culprit(forward))


def test_infinities_in_the_result_that_are_meant() -> None:
    """Scores handed out with their mask: where the -inf was written, and how to allow it."""

    def forward(x: Tensor) -> Tensor:
        scores = x.masked_fill(EMPTY_ROW, -INF)  # culprit
        return scores.reshape(9) * 2

    _, seen = look(Does(forward), torch.zeros(3, 3))
    assert (seen.step.operation, str(seen.step.place)) == ("aten.masked_fill.Scalar", culprit(forward))
    assert any("allow='inf:" in one for one in seen.remarks)


def test_an_overflow_to_the_sign_of_a_mask() -> None:
    """Elements that one operation makes -inf beside those that were -inf before are its own."""

    def forward(x: Tensor) -> Tensor:
        scores = x.masked_fill(torch.eye(3, dtype=torch.bool), -INF) * 1e30
        low = scores * 1e30  # culprit
        return torch.softmax(low, -1)

    _, seen = look(Does(forward), -torch.ones(3, 3))
    assert (seen.step.operation, str(seen.step.place)) == ("aten.mul.Tensor", culprit(forward))


@pytest.mark.parametrize("value", [INF, -INF])
def test_an_infinity_of_the_other_sign_is_not_that_of_the_mask(value: float) -> None:
    """One element is enough."""

    def forward(x: Tensor) -> Tensor:
        scores = x.masked_fill(torch.tensor([[True, False, False]]), value)
        return scores @ -torch.ones(3, 1)  # culprit

    _, seen = look(Does(forward), torch.zeros(1, 3))
    assert (seen.step.operation, str(seen.step.place)) == ("aten.mm.default", culprit(forward))


@pytest.mark.parametrize("counts", [[[0.0, 2.0, 1.0], [0.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]]], ids=str)
def test_a_logarithm_of_counts_is_no_mask(counts: list[list[float]]) -> None:
    """Zeros and ones choose; other numbers do not, and neither do zeros alone."""

    def forward(x: Tensor) -> Tensor:
        weights = torch.tensor(counts).log()  # culprit
        return torch.softmax(x + weights, -1)

    _, seen = look(Does(forward), torch.zeros(3))
    assert (seen.step.operation, str(seen.step.place)) == ("aten.log.default", culprit(forward))


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


def test_memory_that_nobody_wrote() -> None:
    """Memory as it was found, with a nan in it, is what was allocated and not written."""

    def forward(x: Tensor) -> Tensor:
        memory = torch.empty(4)  # culprit
        memory.numpy()[:] = NAN
        memory[1:3] = x
        return memory * 2

    _, seen = look(Does(forward), torch.ones(2))
    assert (seen.step.operation, str(seen.step.place)) == ("aten.empty.memory_format", culprit(forward))
    assert any("allocated and not written" in one for one in seen.remarks)


def test_memory_that_nobody_wrote_is_blamed_last() -> None:
    """It may hold anything: where an operation made a bad value too, that one is named."""

    def forward(x: Tensor) -> Tensor:
        memory = torch.empty(4)
        memory.numpy()[:] = NAN
        return memory + torch.exp(x * 1000)  # culprit

    _, seen = look(Does(forward), torch.ones(4))
    assert (seen.step.operation, str(seen.step.place)) == ("aten.exp.default", culprit(forward))


def test_what_was_overwritten_is_not_blamed() -> None:
    def forward(x: Tensor) -> Tensor:
        memory = torch.log(-x)
        return memory.copy_(torch.exp(x * 1000))  # culprit

    _, seen = look(Does(forward), torch.ones(4))
    assert (seen.step.operation, str(seen.step.place)) == ("aten.exp.default", culprit(forward))


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 8), st.integers(1, 3), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_the_log_knows_who_wrote_each_element_last(writes: list[tuple[int, int, int, bool]]) -> None:
    """Writes to parts of one storage, against a list of who wrote each of its elements last."""
    memory, log = torch.zeros(8), StorageWriteLog[int]()
    last: list[int | None] = [None] * 8
    for number, (start, stop, step, is_bad) in enumerate(writes):
        part = slice(start, max(stop, start + 1), step)
        memory[part] = INF if is_bad else 1.0
        log.put(memory[part], number if is_bad else None)
        for i in range(8)[part]:
            last[i] = number if is_bad else None
    for part in (slice(None), slice(2, 5), slice(0, 8, 3)):
        assert log.find(memory[part]) == sorted({number for number in last[part] if number is not None})
    assert memory in log or set(last) <= {None}
    assert last not in log  # no tensor
    assert log.find(memory[3].expand(2, 5)) == [number for number in last[3:4] if number is not None]


def test_a_full_log_forgets_no_storage_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes room by dropping those that are gone."""
    monkeypatch.setattr("nanwatch.diagnosis.operation._MANY", 2)
    log, alive = StorageWriteLog[int](), [torch.full((2,), INF) for _ in range(4)]
    for number, x in enumerate(alive):
        log.put(torch.full((3,), INF), -1)
        log.put(x, number)
    assert [log.find(x) for x in alive] == [[0], [1], [2], [3]]


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Operations on numbered tensors: the name, and the numbers of two operands, modulo how many there are."""
    names = st.sampled_from(
        ["add", "mul", "cat", "half", "view", "add_", "copy_", "row", "clean", "exp", "mm"]
    )
    return draw(st.lists(st.tuples(names, st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))


def run_program(program: list[tuple[str, int, int]], x: Tensor) -> tuple[Tensor, set[str]]:
    """The sum of all tensors, and the names of the steps that made a bad value of two operands that were finite."""
    held, began = [x, x.flip(0)], set()
    for name, i, j in program:
        a, b = held[i % len(held)], held[j % len(held)]
        finite = bool(torch.isfinite(a).all() and torch.isfinite(b).all())
        if name in ("add_", "copy_"):
            getattr(a, name)(b.clone())
        elif name == "row":
            a[0] = b[1].clone()
        else:
            a = {
                "add": lambda a, b: a + b,
                "mul": lambda a, b: a * b * 1e9,
                "cat": lambda a, b: torch.cat([a[:1], b[1:]]),
                "half": lambda a, b: a * 0.5,
                "view": lambda a, b: a.t(),
                "clean": lambda a, b: a.nan_to_num(1, 2, 3),
                "exp": lambda a, b: a.exp(),
                "mm": lambda a, b: a @ b,
            }[name](a, b)
            held.append(a)
        if finite and not bool(torch.isfinite(a).all()):
            began.add(name)
    return torch.stack(held).mul(1e-9).sum(0), began


@given(programs())
def test_the_culprit_began_it(program: list[tuple[str, int, int]]) -> None:
    """In any program the operation named had finite operands, and a plain run shows such a step of that name."""
    x = torch.tensor([[1.0, 2.0], [3.0, 40.0]])
    total, began = run_program(program, x.clone())
    if bool(torch.isfinite(total).all()):
        return
    _, seen = look(Does(lambda x: run_program(program, x.clone())[0]), x)
    assert seen.step.operation is not None
    name = seen.step.operation.split(".")[1]
    assert name in began
    assert all(one.isfinite for one in seen.step.operands)
