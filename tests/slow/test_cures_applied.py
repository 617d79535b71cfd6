"""Cures of every model of `benchmarks/cures` are applied to its source, which runs unwatched in a new process."""

from __future__ import annotations

from typing import Any

import pytest
from cures.judge import judged
from cures.table import CURES, FAMILIES


@pytest.fixture(scope="module")
def verdicts() -> list[dict[str, Any]]:
    """The verdict on each model."""
    return judged()


def test_nine_of_ten_are_cured(verdicts: list[dict[str, Any]]) -> None:
    assert {one["name"] for one in verdicts} == {cure.name for cure in CURES}
    assert [one["trouble"] for one in verdicts if one["trouble"]] == []
    assert sum(one["works"] for one in verdicts) >= 0.9 * len(CURES), [
        one["name"] for one in verdicts if not one["works"]
    ]


def test_no_cure_is_told_that_does_not_work(verdicts: list[dict[str, Any]]) -> None:
    assert {one["name"]: one["faults"] for one in verdicts if one["faults"]} == {}


def test_git_applies_the_patches(verdicts: list[dict[str, Any]]) -> None:
    assert sum(one["is_patched"] for one in verdicts) >= 60


def test_a_patch_of_each_family_works(verdicts: list[dict[str, Any]]) -> None:
    named = {one["name"]: one for one in verdicts}
    assert {
        family: named[name]
        for family, name in FAMILIES.items()
        if not named[name]["is_patched"] or named[name]["faults"] or named[name]["trouble"]
    } == {}


def test_the_budget_holds(verdicts: list[dict[str, Any]]) -> None:
    """Eight forwards beyond the training's own, and a text that fits a screen."""
    assert max(one["runs"] for one in verdicts) <= 8
    assert max(one["text_lines"] for one in verdicts) < 40
