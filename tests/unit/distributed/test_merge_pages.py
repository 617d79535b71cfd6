"""The page of a merge: what is in it, hostile names, its policy, its size; what a browser makes of it."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from nanwatch import __main__ as command
from nanwatch.distributed.merge import Digest, by_attempt
from nanwatch.distributed.merge_pages import finding_summary, merged_html
from nanwatch.report.page import ABSENT, GONE, ZERO
from nanwatch.util.job import Attempt
from nanwatch.util.visible import visible
from support.html_page import HOSTILE, Page
from support.merges import digests, few, merged_of, report

pytest.importorskip("jinja2", reason="the page needs jinja2: pip install jinja2")


def cells(page: Page) -> list[list[int]]:
    """Return the tenths of a bit of every cell of the map, a row for each module."""
    if not page.scripts:
        return []
    field = page.data["map"]
    values = np.frombuffer(base64.b64decode(field["cells"]), "<i2")
    rows: list[list[int]] = values.reshape(len(field["rows"]), len(field["first"])).tolist()
    return rows


def test_the_origin_comes_first_then_the_map_then_what_differs() -> None:
    """In this order, each with its ranks."""
    page = Page(merged_html(merged_of(few())))
    assert page.unbalanced == []
    assert "".join(page.headline) == "nan first seen in output of layer on rank 2"
    places = [
        page.text.index(words)
        for words in (
            f"First {finding_summary(few()[2])}".replace("`", ""),
            f"Later {finding_summary(few()[0])}".replace("`", ""),
            "Headroom of each module on each rank",
            "Spread between ranks",
            "Weights that are not alike on all ranks",
            "2.500000e-01 to 2.000000e+00 on rank 0, 2, 3",
            "2.500000e-01 to 3.000000e+00 on rank 1",
        )
    ]
    assert places == sorted(places)


def test_a_cell_has_the_room_of_a_module_on_a_rank() -> None:
    """The worst module first, one cell a rank, in tenths of a bit."""
    page = Page(merged_html(merged_of(few())))
    assert cells(page) == [
        [125, 135, GONE, 155],
        [15, 15, 15, 15],
        [70, 60, 50, ABSENT],
        [ZERO, ZERO, ZERO, ZERO],
    ]
    assert page.data["map"]["first"] == page.data["map"]["last"] == [0, 1, 2, 3]


def test_the_page_asks_for_nothing() -> None:
    """Its policy allows its own script and styles alone; there is no address of anything."""
    document = merged_html(merged_of(few()))
    page = Page(document)
    assert page.policy.split(";")[0] == "default-src 'none'"
    assert set(page.scripts) == {"data", "own"}
    assert "http" not in document.replace("http-equiv", "")
    assert "url(" not in page.style
    assert {value for _, a in page.tags for key, value in a.items() if key in ("href", "src")} == {"data:,"}


def test_hostile_names_are_text() -> None:
    """The elements are those of the page with harmless names, and every name is there to read."""
    plain = [tag for tag, _ in Page(merged_html(merged_of(few()))).tags]
    for hostile in HOSTILE:
        page = Page(merged_html(merged_of(few(hostile))))
        assert [tag for tag, _ in page.tags] == plain
        assert page.unbalanced == []
        assert " ".join(visible(f"layer{hostile}").split()) in page.text


def test_a_lone_surrogate_can_be_written() -> None:
    """A name may hold half a character."""
    merged_html(merged_of(few("\ud800"))).encode("utf-8")


@settings(max_examples=25)
@given(digests())
def test_any_merge_makes_a_page(found: list[Digest]) -> None:
    """Balanced, with a cell for each module and rank."""
    merged = merged_of(found)
    page = Page(merged_html(merged))
    assert page.unbalanced == []
    assert [len(row) for row in cells(page)] == [len(found)] * len(merged.modules())
    assert ("All finite" in "".join(page.headline)) == (not merged.failed)


@pytest.mark.parametrize("number", [257, 1000, pytest.param(16_384, marks=pytest.mark.slow)])
def test_of_many_ranks_a_column_is_several(number: int) -> None:
    """At most 1000 columns; the one with the rank that has little room has its least."""
    merged = merged_of([Digest.of(report(rank, low=200)) for rank in range(number)])
    document = merged_html(merged)
    page = Page(document)
    rows, field = cells(page), page.data["map"]
    columns = -(-number // -(-number // 1000))
    assert [len(row) for row in rows] == [columns] * len(merged.modules())
    (column,) = {row.index(70) for row in rows if 70 in row}
    assert field["first"][column] <= 200 <= field["last"][column]
    assert field["last"][-1] == number - 1
    assert len(document) < 1_000_000


def test_the_attempt_is_named_and_the_others_are() -> None:
    """Above the finding which one it is, and below it where the others failed; none is named where no report does."""
    hostile = HOSTILE[0]
    first, second = (
        [replace(one, attempt=Attempt(hostile, number, "", 60.0 * number)) for one in few()]
        for number in range(2)
    )
    before, after = by_attempt([*first, *second])
    page = Page(merged_html(replace(after, others=(before,))))
    assert page.unbalanced == []
    assert f"4 ranks: 0, 1, 2, 3 · {' '.join(str(after.attempt).split())}" in page.text
    other = f"{' '.join(str(before.attempt).split())}, 4 ranks: {finding_summary(few()[2])}"
    assert f"Not merged {other.replace('`', '')}" in page.text
    assert "ttempt" not in Page(merged_html(merged_of(few()))).text


def test_a_map_has_the_worst_modules() -> None:
    """Forty of them; the rest is counted."""
    merged = merged_of([Digest.of(report(rank, num_frames=100)) for rank in range(3)])
    page = Page(merged_html(merged))
    assert [len(row) for row in cells(page)] == [3] * 40
    assert "60 more modules are not shown" in page.text


def test_the_command_writes_it_beside_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """stdout names it below the text; a place that cannot be written is status 2."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.json").write_text(report(0).to_json())
    assert command.main(["merge", str(tmp_path / "run")]) == 0
    plain = capsys.readouterr().out
    assert command.main(["merge", str(tmp_path / "run"), "--html", str(tmp_path / "m.html")]) == 0
    assert capsys.readouterr().out == f"{plain}\nwrote {tmp_path / 'm.html'}\n"
    assert "All finite on 1 rank" in (tmp_path / "m.html").read_text(encoding="utf-8")
    assert command.main(["merge", str(tmp_path / "run"), "--html", str(tmp_path / "no" / "m.html")]) == 2
    assert "No such file" in capsys.readouterr().err
