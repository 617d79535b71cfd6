"""Spikes with a known cause in trainings of small models, and healthy trainings in which there is none.

A few quick cases of `benchmarks/judge_spikes.py`, which has 74 causes and 130 healthy trainings.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from support.paths import BENCHMARKS

PLANTED = [
    "lstm, inputs x 80",
    "recommender, a row x 300, used 20 steps later",
    "lstm, all weights x 0.1",
    "gan, a matrix of the generator x 25",
    "mlp, second moment x 1e-9",
    "mlp, momentum x 300",
    "lstm, gradients x 500 before the step",
    "mlp, inputs x 0.02",
    "second moment after zeros",
    "one sample of an image net",
    "tokens of one batch",
    "a branch opens",
]
HEALTHY = ["mlp 1, restarts", "lstm 6, falls", "gan 15, one_cycle", "recurrent, falls, clips 1.0"]

pytestmark = pytest.mark.filterwarnings("ignore:spike in batch", "ignore:.*overflow expected")


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("judge_spikes")


def case_of(judge: Any, name: str) -> Any:
    return next(one for halves in judge.SETS.values() for half in halves for one in half if one.name == name)


@pytest.mark.parametrize("name", PLANTED)
def test_cause_and_module_are_named(judge: Any, name: str) -> None:
    case = case_of(judge, name)
    assert judge.judge(case, judge.run(case.make, case.plant, seed=case.seed))[0] == "right"


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_training_is_silent(judge: Any, name: str) -> None:
    case = case_of(judge, name)
    assert judge.run(case.make, steps=200, **case.how).spikes == ()
