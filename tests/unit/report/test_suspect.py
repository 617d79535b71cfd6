"""Suspect weights in words."""

from __future__ import annotations

import pytest

from nanwatch.report.suspect import Suspect


@pytest.mark.parametrize(
    ("suspect", "told"),
    [
        (
            Suspect("h.3.ln_1", "weight", 560.0, 1.0),
            ["Grew: abs max of `weight` of h.3.ln_1 from 1 to 560 since"],
        ),
        (
            Suspect("h.3.ln_1", "weight", 560.0, None, "h.*.ln_1", 11, 1.25),
            ["Apart: abs max of `weight` of h.3.ln_1 is 560, the median of the 11 other h.*.ln_1 is 1.25."],
        ),
        (
            Suspect("", "bias", 2.0, 0.5, "*", 1, 0.0),
            [
                "Grew: abs max of `bias` of the root module from 0.5 to 2",
                "Apart: abs max of `bias` of the root module is 2",
            ],
        ),
        (Suspect("fc", "weight", 1.0), []),
    ],
)
def test_a_line_for_growth_and_one_for_siblings(suspect: Suspect, told: list[str]) -> None:
    """Each only where the weight is suspect for it; the root module has a name too."""
    lines = [f"{fact.head}: {fact.body}" for fact in suspect.facts()]
    assert len(lines) == len(told)
    assert all(line.startswith(words) for line, words in zip(lines, told, strict=True)), lines
