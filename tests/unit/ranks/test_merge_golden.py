"""Text, JSON and HTML of a merge are those in tests/golden; `pytest --update-golden` writes them anew."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from nanwatch.ranks.merge import Digest, by_attempt
from nanwatch.ranks.merge_pages import document, merged_text
from support.canonical_reports import ranks
from support.html_page import without_parts


def test_merge(golden: Callable[[str, str], None]) -> None:
    """Four ranks of a restarted job, one the origin and one with another weight."""
    (merged,) = by_attempt(map(Digest.of, ranks()))
    golden("ranks.txt", merged_text(merged) + "\n")
    golden("ranks.json", json.dumps(document(merged), indent=1, allow_nan=False) + "\n")


def test_page(golden: Callable[[str, str], None]) -> None:
    """The page with the heat map."""
    pytest.importorskip("jinja2", reason="the page needs jinja2: pip install jinja2")
    from nanwatch.ranks.merge_pages import merged_html

    (merged,) = by_attempt(map(Digest.of, ranks()))
    golden("ranks.html", without_parts(merged_html(merged)))
