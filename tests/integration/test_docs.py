"""The documentation: each code block and command of it runs and shows what the page shows; pages name what exists."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT
from support.snippets import Page, difference, snippets

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
NEEDS = {"t5-overflow.md": ("transformers", "safetensors"), "two-runs.md": ("pyarrow", "pandas", "plotly", "jinja2")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PAGES, ids=lambda place: place.relative_to(ROOT).as_posix())
def test_what_a_page_shows_happens(place: Path, folder: Path) -> None:
    """Python blocks run and commands print what is shown; a block that does not run says why."""
    if missing := [name for name in NEEDS.get(place.name, ()) if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    page = Page(place, folder)
    for snippet in snippets(place.read_text(encoding="utf-8")):
        assert snippet.how == "run" or snippet.reason, f"{place.name}:{snippet.line} is not run, without a reason"
        page.run(snippet)
