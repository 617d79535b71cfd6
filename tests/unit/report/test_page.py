"""Pages: cells of headroom, and data that no name can break out of."""

from __future__ import annotations

import base64
from math import inf, nan

import numpy as np
import pytest

from nanwatch.report.page import ABSENT, GONE, ZERO, Chart, HeatMap, Level, Table, headroom_cells, page
from support.html_page import HOSTILE, Page


def test_a_cell_is_tenths_of_a_bit() -> None:
    """What has no number, no room left or no value but zero has a cell of its own, below and above all others."""
    cells = headroom_cells(np.array([[nan, -inf, inf], [-0.5, 2.04, 1024.0]]))
    assert cells.tolist() == [[ABSENT, GONE, ZERO], [-5, 20, 10240]]
    assert ABSENT < GONE < -5
    assert ZERO > 20980


@pytest.mark.parametrize(
    ("bits", "level", "words"),
    [(None, "none", ""), (-inf, "gone", "none left"), (1.9, "near", "1.9 bits"), (3.0, "low", "3.0 bits"),
     (40.0, "fine", "40.0 bits"), (inf, "fine", "all zero")],
)  # fmt: skip
def test_a_headroom_has_a_colour_and_words(bits: float | None, level: str, words: str) -> None:
    assert (Level(bits).level, str(Level(bits))) == (level, words)


def test_names_are_text_and_numbers_are_bytes() -> None:
    """In facts, tables, charts and maps; the cells of a map come back as they were."""
    pytest.importorskip("jinja2")
    cells = headroom_cells(np.array([[1.0, -inf], [nan, 3.5]]))
    sections = [
        Table("t", HOSTILE[0], {HOSTILE[1]: ""}, [[HOSTILE[2]], [Level(1.0)]]),
        Chart("c", "chart", "", "", "x", "y", [{"name": HOSTILE[0], "x": [0], "y": [1.0]}]),
        HeatMap(
            "map",
            "",
            "",
            rows=HOSTILE[:2],
            first=[0, 1],
            last=[0, 1],
            columns=("batch", "batches"),
            cells=cells,
        ),
    ]
    text = page("a test", HOSTILE[0], HOSTILE[1], [(HOSTILE[2], HOSTILE[3])], sections, is_bad=True)
    shown = Page(text)
    assert shown.unbalanced == []
    assert set(shown.scripts) == {"data", "own"}
    assert not any(name.startswith("on") for _, attributes in shown.tags for name in attributes)
    packed = base64.b64decode(shown.data["map"]["cells"])
    assert np.frombuffer(packed, "<i2").reshape(2, 2).tolist() == cells.tolist()
    assert shown.data["charts"]["c-chart"]["lines"][0]["name"] == HOSTILE[0]
