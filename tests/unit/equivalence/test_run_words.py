"""Sentences about two recorded runs."""

from __future__ import annotations

from nanwatch.equivalence.comparison import ModuleError
from nanwatch.equivalence.packed import STRIDE
from nanwatch.equivalence.recorded_run import RecordedRun
from nanwatch.equivalence.run_words import growth, which_tokens


def test_which_tokens_says_what_they_have_in_common() -> None:
    """Chunks, positions and requests."""
    run = RecordedRun("e", tokens=[[1] * 6, [1] * 4], sampled=[1, 1], steps={i: i // 2 for i in range(6)})
    places = [*range(5), *(STRIDE + i for i in range(3))]
    assert "in later chunks of a prompt or behind its cached part only" in which_tokens(
        [2, 3, 4], places, run
    )
    words = which_tokens([STRIDE + 1, STRIDE + 2], places, run)
    assert "none before position 1" in words
    assert "of request 1" in words


def test_growth_is_told_by_layer() -> None:
    """Twice by 3 over three layers; a layer that makes it 100 times as large is named."""
    errors = {"slow": (1e-6, 3e-6, 9e-6), "jump": (1e-6, 1e-4, 1e-4)}
    rows = {
        name: [ModuleError(f"layers.{i}", f"layers.{i}", "L", "L", 0.0, x, 1e-7) for i, x in enumerate(row)]
        for name, row in errors.items()
    }
    assert "x 3.00 a layer" in growth(rows["slow"])
    assert "layer 1 makes it 1e+02 times as large" in growth(rows["jump"])
    assert growth(rows["slow"][:1]) == ""
