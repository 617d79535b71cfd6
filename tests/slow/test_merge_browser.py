"""The page of a merge in headless Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanwatch.distributed.merge_pages import merged_html
from support import chromium
from support.chromium import Browser
from support.html_page import HOSTILE
from support.merges import few, merged_of

pytest.importorskip("jinja2")


@pytest.mark.skipif(chromium.PATH is None, reason="needs Chromium: apt-get install chromium")
def test_in_a_browser_colours_follow_the_room(tmp_path: Path) -> None:
    """Cells without room, with little, with some and with much have four colours; nothing is asked of anybody."""
    path = tmp_path / "merged.html"
    path.write_text(merged_html(merged_of(few())), encoding="utf-8")
    with Browser(tmp_path / "profile") as browser:
        tab = browser.open(path)
        tab.wait("document.readyState === 'complete' && !!document.querySelector('#map[data-drawn]')")
        assert len(set(tab.ask("[field.gone, 15, 60, 125].map((value) => shade(value))"))) == 4
        assert tab.ask("words(0, 2)") == "layer · rank 2 · not finite"
        elements = tab.ask("document.querySelectorAll('body *').length")
    assert (tab.requests, tab.complaints) == ([], [])
    # Names that are markup make no elements.
    path.write_text(merged_html(merged_of(few("".join(HOSTILE)))), encoding="utf-8")
    with Browser(tmp_path / "other") as browser:
        tab = browser.open(path)
        tab.wait("document.readyState === 'complete' && !!document.querySelector('#map[data-drawn]')")
        assert tab.ask("document.querySelectorAll('body *').length") == elements
    assert (tab.requests, tab.complaints) == ([], [])
