"""The documentation: each code block and command of it runs and shows what the page shows; pages name what exists."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT
from support.snippets import Page, snippets

DOCS = ROOT / "docs"
TRANSLATIONS = sorted(DOCS.glob("getting-started.*.md"))
PAGES = [ROOT / "README.md", *sorted(set(DOCS.rglob("*.md")) - set(TRANSLATIONS))]
SLOW = {
    "slow-divergence.md",
    "t5-overflow.md",
    "two-runs.md",
    "four-ranks.md",
    "job-hangs.md",
    "not-repeatable.md",
    "wrong-compiled.md",
    "unchanged-script.md",
}
NATIVE = {"blackbox.md", "job-hangs.md"}  # the compiled recorder writes the black box
NEEDS = {"t5-overflow.md": ("transformers", "safetensors"), "two-runs.md": ("pyarrow", "pandas", "jinja2")}


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


@pytest.mark.filterwarnings("ignore")  # a page may warn, as its reader's run does
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(
            place,
            marks=[
                *[pytest.mark.slow] * (place.name in SLOW),
                *[pytest.mark.native] * (place.name in NATIVE),
            ],
        )
        for place in PAGES
    ],
    ids=[place.relative_to(ROOT).as_posix() for place in PAGES],
)
def test_what_a_page_shows_happens(place: Path, folder: Path) -> None:
    """Python blocks run and commands print what is shown; a block that does not run says why."""
    if missing := [name for name in NEEDS.get(place.name, ()) if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    page = Page(place, folder)
    for snippet in snippets(place.read_text(encoding="utf-8")):
        assert snippet.skipped != "", f"{place.name}:{snippet.line} is skipped without a reason"
        page.run(snippet)


@pytest.mark.parametrize("place", TRANSLATIONS, ids=lambda place: place.stem)
def test_a_translation_shows_what_the_original_shows(place: Path) -> None:
    """Its code and commands are those of the English page, which run."""
    original = {
        snippet.body for snippet in snippets((DOCS / "getting-started.md").read_text(encoding="utf-8"))
    }
    translated = [snippet.body for snippet in snippets(place.read_text(encoding="utf-8"))]
    assert len(translated) >= 4
    assert not set(translated) - original
