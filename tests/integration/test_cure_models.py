"""The models of `benchmarks/cures` fail as their table says, and the chosen line cures each. Plain PyTorch."""

from __future__ import annotations

import difflib

import pytest
from cures.program import OUTSIDE, Program
from cures.table import CURES, MODELS, Cure

pytestmark = pytest.mark.filterwarnings("ignore:(var|std)\\(\\):UserWarning")

EACH = pytest.mark.parametrize("cure", CURES, ids=lambda cure: cure.name)


@EACH
def test_the_model_fails_in_its_phase(cure: Cure) -> None:
    outcome = Program(cure.path, cure.path.read_text()).run(cure.steps)
    assert outcome.step == cure.steps - 1
    assert outcome.forward == (cure.phase == "backward")
    if cure.phase == "backward":
        assert not outcome.backward


@EACH
def test_the_operation_and_its_line_make_the_value(cure: Cure) -> None:
    program = Program(cure.path, cure.path.read_text())
    assert (cure.module, cure.operation, cure.culprit) in program.faults(cure.phase, cure.steps)
    assert cure.module in {OUTSIDE, *dict(program.model.named_modules())}


@EACH
def test_the_chosen_line_cures_it(cure: Cure) -> None:
    outcome = Program(cure.path, cure.cured()).run(cure.steps)
    assert outcome == (cure.steps - 1, True, True)


@EACH
def test_the_cure_changes_its_line_only(cure: Cure) -> None:
    before, after = cure.path.read_text().splitlines(), cure.cured().splitlines()
    changed = [x for x in difflib.ndiff(before, after) if x[0] in "+-"]
    assert [x[2:].strip() for x in changed] == [cure.line, cure.fixed]
    assert before[cure.number() - 1].strip() == cure.line


def test_the_table_names_every_model_once() -> None:
    assert len(CURES) >= 80
    assert sorted(cure.name for cure in CURES) == sorted(path.stem for path in MODELS.glob("*.py"))


def test_the_sources_are_public_addresses() -> None:
    assert all(cure.source.startswith("https://") for cure in CURES)
    assert len({cure.source for cure in CURES}) == len(CURES)


def test_both_phases_are_covered() -> None:
    backward = sum(cure.phase == "backward" for cure in CURES)
    assert 0.4 <= backward / len(CURES) <= 0.6
