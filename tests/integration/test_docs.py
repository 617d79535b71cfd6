"""The documentation: each code block and command of it runs and shows what the page shows.

A fence ```python runs in the namespace of its page, which begins with `nanwatch`, `torch`, `nn` and a small `model`.
With a title it is written to a file of that name. A fence ```text behind it is what it prints. A fence ```console has
commands after `$ `, each followed by what it shows on stdout and stderr; `make` and `pip install` are left to CI and
tests/slow/test_install.py. `[...]` stands for any text. Decimal numbers and those from 100 up agree when they are
within a fifth of each other, as kernels differ between CPUs. An abs min, the number before an abs max, agrees with any
other that is 0 or not as it is: the value next to 0 among thousands is a matter of rounding. A comment before a fence
changes what is done with it:

    <!-- test: skip, REASON -->    nothing runs; code is compiled
    <!-- test: setup               this code runs first
    CODE
    -->
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanwatch
from support.paths import ROOT
from support.processes import environment, forking_python

DOCS = ROOT / "docs"
TRANSLATIONS = sorted(DOCS.glob("getting-started.*.md"))
PAGES = [ROOT / "README.md", *sorted(set(DOCS.rglob("*.md")) - set(TRANSLATIONS))]
SLOW = {
    *("slow-divergence.md", "t5-overflow.md", "two-runs.md", "four-ranks.md"),
    *("job-hangs.md", "not-repeatable.md", "wrong-compiled.md", "unchanged-script.md"),
}
NATIVE = {"blackbox.md", "job-hangs.md"}  # the compiled recorder writes the black box
NEEDS = {"t5-overflow.md": ("transformers", "safetensors"), "two-runs.md": ("pyarrow", "pandas", "jinja2")}


_PIECE = re.compile(
    r"^<!-- test: (?P<word>skip|setup)(?P<rest>.*?)-->\n"
    r"|^```(?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_PARTS = re.compile(r"(\n\[\.\.\.\](?=\n|$)|\[\.\.\.\])")  # a line of its own may stand for no line
_NUMBER = re.compile(
    r"(?<![\w.,])[-+]?(?:\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+|\d{1,3}(?:,\d{3})+|\d{3,})(?![\w.,]*\d|\w)"
)
_ABS_MIN = re.compile(r"^(?=\d\.\d\de[-+]\d\d +(?:\d\.\d\de[-+]\d\d|inf|nan) )", re.MULTILINE)
_SECONDS = 240
_ENVIRONMENT = {"COLUMNS": "80", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
_SHELL = """python() { "$PYTHON_EXEC" "$@"; }
nanwatch() { "$PYTHON_EXEC" -m nanwatch "$@"; }
torchrun() { "$PYTHON_EXEC" -m torch.distributed.run "$@"; }
"""


@dataclass(frozen=True)
class Snippet:
    """A fence of a page. `skipped` is the reason why it does not run, or None."""

    kind: str
    body: str
    line: int
    title: str | None
    skipped: str | None
    setup: str
    output: str | None

    @property
    def commands(self) -> list[tuple[str, str]]:
        """The commands of a console fence, each with what it shows."""
        parts = re.split(r"^\$ ", self.body, flags=re.MULTILINE)[1:]
        return [(command, shown) for command, _, shown in (part.partition("\n") for part in parts)]


def snippets(page: str) -> list[Snippet]:
    """Return the fences with code or commands, in order."""
    fences: list[Snippet] = []
    skipped, setup = None, ""
    end = 0
    for piece in _PIECE.finditer(page):
        if piece["word"] == "setup":
            setup = piece["rest"]
        elif piece["word"]:
            skipped = piece["rest"].strip(", \n")
        elif piece["kind"] == "text":
            if fences and fences[-1].kind == "python" and not page[end : piece.start()].strip():
                fences[-1] = Snippet(**{**vars(fences[-1]), "output": piece["body"]})
        else:
            line = page.count("\n", 0, piece.start()) + 1
            fences.append(Snippet(piece["kind"], piece["body"], line, piece["title"], skipped, setup, None))
            skipped, setup = None, ""
        end = piece.end()
    return fences


class Page:
    """Runs the snippets of one page in a folder."""

    def __init__(self, place: Path, folder: Path) -> None:
        self._place = place
        self._folder = folder
        self._names: dict[str, Any] = {"__name__": "__page__", "nanwatch": nanwatch, "torch": torch, "nn": nn}
        self._names["model"] = nn.Sequential(nn.Linear(2, 2))

    def run(self, snippet: Snippet) -> None:
        """Run a snippet and compare its output; an AssertionError names the page and the line."""
        where = f"{self._place.name}:{snippet.line}"
        if snippet.kind == "python":
            self._python(snippet, where)
        elif snippet.kind == "console" and snippet.skipped is None:
            for command, shown in snippet.commands:
                if not command.startswith(("make ", "pip install ")):
                    self._command(command, shown, f"{where}: $ {command}")

    def _python(self, snippet: Snippet, where: str) -> None:
        if snippet.body.startswith(">>>"):
            for example in doctest.DocTestParser().get_examples(snippet.body):
                check(example.want, self._execute(compile(example.source, where, "single")), where)
            return
        code = compile(snippet.body, where, "exec")
        if snippet.title is not None:
            (self._folder / snippet.title).write_text(snippet.body, encoding="utf-8")
        elif snippet.skipped is None:
            exec(compile(snippet.setup, where, "exec"), self._names)
            printed = self._execute(code)
            if snippet.output is not None:
                check(snippet.output, printed, where)

    def _execute(self, code: Any) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, self._names)
        return out.getvalue()

    def _command(self, command: str, shown: str, where: str) -> None:
        env = environment(**_ENVIRONMENT, PYTHON_EXEC=forking_python())
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        line = ["bash", "-c", _SHELL + command]
        done = subprocess.run(line, cwd=self._folder, env=env, text=True, timeout=_SECONDS, **streams)
        if shown:
            check(shown, done.stdout, where)
        else:
            assert done.returncode == 0, f"{where} ended with {done.returncode}\n{done.stdout}"


def check(shown: str, printed: str, where: str) -> None:
    """Raise an AssertionError that says what of `shown` is not in `printed`."""
    pattern = "".join(map(_pattern, _PARTS.split(shown.rstrip())))
    match = re.fullmatch(pattern, printed.rstrip(), re.DOTALL)
    assert match, f"{where}: shown:\n{shown}\n--- printed:\n{printed}"
    text = re.sub(r"\[\.\.\.\]", " ", shown)
    minima = {number.start() for number in _ABS_MIN.finditer(text)}
    apart = [
        f"{want[0]} shown, {got} printed"
        for want, got in zip(_NUMBER.finditer(text), match.groups(), strict=True)
        if not _agree(want[0], got, is_abs_min=want.start() in minima)
    ]
    assert not apart, f"{where}: {apart}\n--- printed:\n{printed}"


def _agree(shown: str, printed: str, *, is_abs_min: bool) -> bool:
    want, got = (float(number.replace(",", "")) for number in (shown, printed))
    return (want == 0) == (got == 0) if is_abs_min else math.isclose(want, got, rel_tol=0.2)


def _pattern(part: str) -> str:
    if part in ("[...]", "\n[...]"):
        return r"(?:\n.*?)?" if part.startswith("\n") else r".*?"
    # A number that is one character longer moves its neighbours.
    words = [re.sub(r"(?:\\ )+", r"\\ +", re.escape(words)) for words in _NUMBER.split(part)]
    return r"([-+]?\d[\d.,]*(?:e[-+]?\d+)?)".join(words)


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


def with_marks(place: Path) -> Any:
    marks = [pytest.mark.slow] * (place.name in SLOW) + [pytest.mark.native] * (place.name in NATIVE)
    return pytest.param(place, marks=marks, id=place.relative_to(ROOT).as_posix())


@pytest.mark.filterwarnings("ignore")  # a page may warn, as its reader's run does
@pytest.mark.parametrize("place", [*map(with_marks, PAGES)])
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
    """It has the sections, code and links of the English page, in the same order."""
    pages = [page.read_text(encoding="utf-8") for page in (DOCS / "getting-started.md", place)]
    parts = [([x.body for x in snippets(page)], re.findall(r"\n## |\]\(([^)\s]+)\)", page)) for page in pages]
    assert parts[1] == parts[0]
