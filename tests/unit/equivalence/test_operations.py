"""Operations of two runs: the first with which the difference of a tensor begins."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from nanwatch.equivalence.operations import (
    Operand,
    OperationDifference,
    OperationLog,
    OperationRecord,
    first_operation,
)
from nanwatch.util.place import Place

# Storages of tensors.
X, Y, Z, OTHER = 1, 2, 3, 4


def operation(
    name: str, operands: dict[int, int], results: dict[int, int], **changes: Any
) -> OperationRecord:
    """An operation that read and wrote these storages, each with the bits of its content."""
    given = [Operand(bits, storage, "made") for storage, bits in operands.items()]
    made = [(bits, storage) for storage, bits in results.items()]
    plain = OperationRecord(
        name, "fc", "Linear", Place("m.py", 3), given, "", made, False, False, False, False
    )
    return plain._replace(**changes)


def run(noise: int = 0, **changes: Any) -> list[OperationRecord]:
    """x -> y -> z, and another tensor beside the way; `noise` is what the second operation adds."""
    return [
        operation("rand", {}, {OTHER: 5 + noise}),
        operation("mul", {X: 1}, {Y: 2}),
        operation("sum", {Y: 2}, {Z: 3 + noise}, **changes),
    ]


def test_what_differs_beside_the_way_is_not_blamed() -> None:
    """The sum made the difference of z; the random numbers have no part in it."""
    found = first_operation(run(), run(noise=1), Z)
    assert found is not None
    assert (found.a.name, found.how) == ("sum", "results")
    beside = first_operation(run(), run(noise=1), OTHER)
    assert beside is not None
    assert beside.a.name == "rand"


@pytest.mark.parametrize(
    ("b", "how", "name"),
    [
        (run(), None, ""),
        (run(numbers="dim=1"), "numbers", "sum"),
        (run()[:2], "path", "sum"),
        ([*run()[:2], operation("mean", {Y: 2}, {Z: 3})], "path", "sum"),
    ],
)
def test_runs_differ_by_arguments_or_by_their_way(
    b: list[OperationRecord], how: str | None, name: str
) -> None:
    """Equal runs have no difference."""
    found = first_operation(run(), b, 0)
    assert (found and (found.how, found.a.name)) == (how and (how, name))


def test_a_difference_is_followed_to_where_it_began() -> None:
    """Through the operand that differs, which the difference names."""
    a = run()
    b = [a[0], operation("mul", {X: 1}, {Y: 7}), operation("sum", {Y: 7}, {Z: 8})]
    found = first_operation(a, b, Z)
    assert found is not None
    assert (found.a.name, found.how) == ("mul", "results")
    assert OperationDifference("operands", a[2], b[2]).operand == a[2].operands[0]


def test_a_record_comes_back_from_json() -> None:
    """With its place and its operands, by which runs are compared."""
    record = run()[2]
    back = OperationRecord.of(json.loads(json.dumps(record)))
    assert (back.place, back.operands, back.bits, back.name) == (
        record.place,
        record.operands,
        record.bits,
        "sum",
    )


def test_the_log_records_what_was_given_and_made() -> None:
    """While it is active; the results are what they are without it, and memory left unwritten is known as such."""
    log = OperationLog(frozenset(), lambda: ("fc", "Linear"), fill=None)
    x = torch.arange(4.0)

    def compute() -> Tensor:
        return (x * 2).add_(1).sum()

    expected = compute()
    with log:
        compute()
        log.active = True
        made = compute()
        empty = torch.empty(3)
        empty.add_(1)
        log.active = False
        compute()
    assert torch.equal(made, expected)
    names = [one.name for one in log.records]
    assert [name.split(".")[1] for name in names] == ["mul", "add_", "sum", "empty", "add_"]
    mul, add, total, _, last = log.records
    assert (mul.module, mul.operands[0].origin, add.operands[0].origin) == ("fc", "outside", "made")
    assert last.operands[0].origin == "unwritten"
    assert mul.results[0] == (add.operands[0].bits, add.operands[0].storage)
    assert add.bits == [total.operands[0].bits]
    assert mul.place is not None
    assert mul.place.file == __file__
    assert log.writes == {}
