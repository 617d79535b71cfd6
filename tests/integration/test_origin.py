"""The origin of failures in ordinary programs: a sample of what `benchmarks/judge_origin.py` judges."""

from __future__ import annotations

import os

import pytest
from judge_origin import judge

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="a re-run in the process takes longer")]


def test_the_origin_is_named() -> None:
    """The line, the operation and the module that made a value, and the tensor that a value was planted in."""
    wrong: list[str] = []
    score = judge("", 75, 8, "", 0, wrong.append)
    assert len(score) == 7
    assert all(right >= 0.97 * judged for right, judged in score.values()), wrong
