"""A skipped step in words: its scale before, and after where it fell."""

from __future__ import annotations

import pytest

from nanwatch.report.finding import Finding
from nanwatch.report.skipped_step import SkippedStep

FINDING = Finding("fc", "Linear", "weight.grad", 3, 0, "inf", "produced", None, 1, 4, (0,))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (65536.0, 32768.0, "scale 65536 → 32768"),
        (65536.0, 65536.0, "scale 65536"),
        (65536.0, None, "scale 65536"),
        (0.25, 0.125, "scale 0.25 → 0.125"),
        (1e20, 5e19, "scale 1e+20 → 5e+19"),
        (None, 2.0, ""),
    ],
)
def test_the_note_has_the_scale(before: float | None, after: float | None, words: str) -> None:
    """None where no GradScaler was found: then the new scale means nothing."""
    step = SkippedStep(3, before, after, FINDING)
    assert (step.note.kind, step.note.text) == ("skipped_step", words)
    assert str(step) == str(step.note)
