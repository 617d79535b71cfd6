"""Statements that are found in a program: run again they make its loss, and they go as far as they are asked to."""

import ast
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.diagnosis.loss_statements import LossStatements, _callers, place_of_step
from nanwatch.diagnosis.provenance import Expression
from nanwatch.diagnosis.statements import part_of


class Look:
    """In a program what makes a backward, or a model: notes the statements that led to its call, or are around it."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.called: Any = None

    def note(self) -> None:
        caller = _callers(sys._getframe(2))[0]._replace(**self.changes)
        file, _ = caller.source()
        self.part = part_of(caller, file)
        if self.part is not None:
            self.statements = LossStatements(nn.Identity(), caller, file, self.part, self.called)

    def backward(self, loss: Tensor) -> None:
        self.loss = loss
        self.note()

    def call(self, x: Tensor, **options: Any) -> Tensor:
        self.note()
        return x + sum(options.values())


def in_a_loop(look: Look, x: Tensor) -> None:
    total, scale = x.sum() * 0, 1.0
    for _ in range(3):
        total = total + scale * x.sum()
        scale = scale * 2  # which the next turn reads
    while True:
        total, scale = total + x.sum(), scale - 1
        if scale < 6:
            break
    look.backward(total)


def by_a_module_bound_anew(look: Look, x: Tensor) -> None:
    critic = nn.Linear(2, 1)
    loss = critic(x).sum()
    critic = critic.eval()
    look.backward(loss)


@pytest.mark.parametrize("program", [in_a_loop, by_a_module_bound_anew])
def test_the_statements_make_the_loss_again(program: Any) -> None:
    """A module is not made again: it would have other weights."""
    program(look := Look(), torch.ones(2, requires_grad=True))
    assert torch.equal(look.statements.run({}), look.loss)


def test_what_is_handed_in_has_no_statements() -> None:
    def of_its_caller(look: Look, loss: Tensor) -> None:
        look.backward(loss)

    of_its_caller(look := Look(), torch.ones(2, requires_grad=True).sum())
    assert look.part is None
    for x, is_whole in ((leaf := torch.ones(2, requires_grad=True), True), (leaf * 2, False)):
        in_a_loop(look, x)
        assert look.part.is_whole == is_whole
    code = made.__code__  # in none of the statements
    place = Expression(__file__, code.co_firstlineno + 1, None, code)
    assert look.statements.target(place).functions == (made,)


def made(look: Look, rows: Tensor) -> Tensor:
    x = rows / rows.sum()
    logits = look.call(x)
    return logits.sum()


def only_called(look: Look, rows: Tensor) -> None:
    x = rows / rows.sum()
    look.call(x)


CALL = "__nanwatch_value__(look.call, x)"


@pytest.mark.parametrize(("program", "value"), [(made, "logits.sum()"), (only_called, CALL)])
def test_statements_lead_on_to_a_return_or_end_with_the_call(program: Any, value: str) -> None:
    program(look := Look(around=("look.call", 0), makes_arguments=True), torch.zeros(2))
    call = [f"logits = {CALL}"] if program is made else []
    expected = ["x = rows / rows.sum()", *call, f"raise __nanwatch_return__({value})"]
    assert [ast.unparse(x) for x in look.part.body] == expected


def test_statements_make_an_argument_that_is_computed() -> None:
    def handed_on(look: Look, x: Tensor) -> Tensor:
        return look.call(x).sum()

    def computed(look: Look, x: Tensor) -> Tensor:
        return look.call(x * 2).sum()

    for program in (handed_on, computed):
        program(look := Look(around=("look.call", 0), makes_arguments=True), torch.full((2,), torch.nan))
        assert look.part.makes_arguments == (program is computed)


def test_a_keyword_of_the_call_is_no_name_of_the_statements_that_lead_on() -> None:
    def program(look: Look, x: Tensor) -> Tensor:
        scale = 3.0
        return look.call(x, scale=1.0) * scale

    look = Look(around=("look.call", 0))
    look.called = lambda x, scale: x + scale
    expected = program(look, x := torch.ones(2))
    assert torch.equal(look.statements.run({"scale": 1.0}, (x,)), expected)


def test_the_step_of_the_optimizer_that_holds_the_weight() -> None:
    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(1))]) for _ in range(2))
    place = place_of_step(second.param_groups[0]["params"][0])
    first.step()
    second.step()
    assert (place.file, place.line) == (__file__, sys._getframe().f_lineno - 1)
