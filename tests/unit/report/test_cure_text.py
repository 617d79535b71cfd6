"""The lines of a cure: what its patch takes out and puts in, as a text report and a page show it."""

from __future__ import annotations

import difflib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanwatch.report.cure_text import changed_lines, patch_lines
from nanwatch.report.finding import Cure
from nanwatch.report.report import Report
from support.canonical_reports import REPORTS
from support.html_page import HOSTILE, Page

# Lines that a patch's own signs can be taken for.
_LINE = st.sampled_from(["x = 1", "-- y", "++ z", "-", "", "    deep = x / y"])


def diff(old: list[str], new: list[str]) -> str:
    return "".join(
        f"{line}\n" for line in difflib.unified_diff(old, new, "a/model.py", "b/model.py", lineterm="")
    )


@given(st.lists(_LINE, max_size=6), st.lists(_LINE, max_size=6), st.lists(_LINE, max_size=6))
def test_a_line_has_its_part_in_the_change(head: list[str], old: list[str], new: list[str]) -> None:
    """Without the lines that are new the patch has the old file's lines, and the other way round."""
    before, after = [*head, *old, "end"], [*head, *new, "end"]
    lines = patch_lines(Cure("x", True, patch=diff(before, after)))
    for kind, whole in (("old", before), ("new", after)):
        shown = [line[1:] for part, line in lines if part in (kind, "same")]
        assert "\n".join(shown) in "\n".join(whole)
    removed = [line for part, line in lines if part == "old"]
    added = [line for part, line in lines if part == "new"]
    assert len(before) - len(removed) + len(added) == len(after)
    assert sum(part == "head" for part, _ in lines) in (0, 3)


@pytest.mark.parametrize("indent", ["", "    ", "\t\t"])
def test_the_text_shows_two_lines_without_their_indentation(indent: str) -> None:
    patch = diff(["def f(x, n):", indent + "y = x / n"], ["def f(x, n):", indent + "y = x / (n + 1e-6)"])
    assert changed_lines(Cure("add an eps", True, 12.0, patch, "changes 3 of 8 elements")) == [
        "       - y = x / n",
        "       + y = x / (n + 1e-6)",
    ]


def test_code_without_a_patch_is_shown_as_what_to_write() -> None:
    assert changed_lines(Cure("a smaller step", True, code="lr = 1e-3")) == ["       + lr = 1e-3"]


def test_the_page_shows_the_cures_first_and_the_patch_in_elements() -> None:
    """Before all other lines of the finding; what is taken out as <del>, what is put in as <ins>, nothing as markup."""
    report = REPORTS["nan_produced"]()
    page = Page(report.to_html())
    assert page.unbalanced == []
    assert page.text.index("keep the divisor above zero") < page.text.index("the first at [2, 0]")
    assert "- return x / x.norm(dim=-1, keepdim=True) +" in page.text
    assert "# <b>one</b> row each" in page.text
    kinds = [(tag, a["class"]) for tag, a in page.tags if tag in ("del", "ins")]
    assert kinds == [("del", "old"), ("ins", "new"), ("ins", "new")]


def test_a_hostile_patch_is_text() -> None:
    """A hostile patch adds no element and no line of its own to the page."""
    hostile = [name.replace("\n", " ") for name in HOSTILE]
    plain, bad = (
        Page(
            _with_cure(
                Cure(words[0], True, patch=diff([*words, "a"], [*words, "b"]), effect=words[0])
            ).to_html()
        )
        for words in (["x"] * len(hostile), hostile)
    )
    assert [tag for tag, _ in bad.tags] == [tag for tag, _ in plain.tags]
    assert bad.unbalanced == []


def _with_cure(cure: Cure) -> Report:
    report = REPORTS["nan_produced"]()
    assert report.finding is not None
    return replace(report, finding=replace(report.finding, cures=(cure,)))
