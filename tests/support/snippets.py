"""Code and commands of a page of documentation: found, run in a folder, and their output compared.

A fence ```python runs, in one namespace for the page; with a title it is written to a file of that name. A fence ```text
behind it is what it prints. A fence ```console has commands after `$ `, each followed by what it shows on stdout and
stderr. `[...]` stands for any text. Decimal numbers agree when they are within a fifth of each other, as kernels differ
between CPUs. A comment before a fence changes what is done with it:

    <!-- test: skip, REASON -->            nothing
    <!-- test: compile only, REASON -->    the code is compiled
    <!-- test: setup                       this code runs first
    CODE
    -->
"""

from __future__ import annotations

import contextlib
import doctest
import io
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.processes import environment

_PIECE = re.compile(
    r"^<!-- test: (?P<word>skip|compile only|setup)(?P<rest>.*?)-->\n"
    r"|^```(?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?![\w.]*\d)")
_SECONDS = 240
_FIRST = {"python": sys.executable, "nanwatch": f"{sys.executable} -m nanwatch"}
_FIRST["torchrun"] = f"{sys.executable} -m torch.distributed.run"


@dataclass(frozen=True)
class Snippet:
    """A fence of a page. `how` is "run", "compile only" or "skip"."""

    kind: str
    body: str
    line: int
    title: str | None
    how: str
    reason: str
    setup: str
    output: str | None

    @property
    def commands(self) -> list[tuple[str, str]]:
        """The commands of a console fence, each with what it shows."""
        parts = re.split(r"^\$ ", self.body, flags=re.MULTILINE)[1:]
        return [(command, shown) for command, _, shown in (part.partition("\n") for part in parts)]


def snippets(page: str) -> list[Snippet]:
    """Return the fences with code or commands, in order."""
    found: list[Snippet] = []
    how, reason, setup = "run", "", ""
    end = 0
    for piece in _PIECE.finditer(page):
        if piece["word"] == "setup":
            setup = piece["rest"]
        elif piece["word"]:
            how, reason = piece["word"], piece["rest"].strip(", \n")
        elif piece["kind"] == "text":
            if found and found[-1].kind == "python" and not page[end : piece.start()].strip():
                found[-1] = Snippet(**{**vars(found[-1]), "output": piece["body"]})
        else:
            line = page.count("\n", 0, piece.start()) + 1
            found.append(
                Snippet(piece["kind"], piece["body"], line, piece["title"], how, reason, setup, None)
            )
            how, reason, setup = "run", "", ""
        end = piece.end()
    return found


class Page:
    """Runs the snippets of one page in a folder."""

    def __init__(self, place: Path, folder: Path) -> None:
        self._place = place
        self._folder = folder
        self._names: dict[str, Any] = {"__name__": "__page__"}

    def run(self, snippet: Snippet) -> None:
        """Run a snippet and compare its output; an AssertionError names the page and the line."""
        where = f"{self._place.name}:{snippet.line}"
        if snippet.kind == "python":
            self._python(snippet, where)
        elif snippet.kind == "console" and snippet.how == "run":
            for command, shown in snippet.commands:
                self._command(command, shown, where)

    def _python(self, snippet: Snippet, where: str) -> None:
        if snippet.body.startswith(">>>"):
            for example in doctest.DocTestParser().get_examples(snippet.body):
                printed = self._execute(compile(example.source, where, "single"))
                assert not difference(example.want, printed), f"{where}: {difference(example.want, printed)}"
            return
        code = compile(snippet.body, where, "exec")
        if snippet.title is not None:
            (self._folder / snippet.title).write_text(snippet.body, encoding="utf-8")
        elif snippet.how == "run":
            exec(compile(snippet.setup, where, "exec"), self._names)
            printed = self._execute(code)
            if snippet.output is not None:
                found = difference(snippet.output, printed)
                assert not found, f"{where}: {found}"

    def _execute(self, code: Any) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, self._names)
        return out.getvalue()

    def _command(self, command: str, shown: str, where: str) -> None:
        word, _, rest = command.partition(" ")
        done = subprocess.run(
            ["bash", "-c", f"{_FIRST.get(word, word)} {rest}"],
            cwd=self._folder,
            env=environment(COLUMNS="80", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_SECONDS,
        )
        found = difference(shown, done.stdout) if shown else ""
        assert not found, f"{where}: $ {command}\n{found}\n--- printed:\n{done.stdout}"
        assert shown or done.returncode == 0, f"{where}: $ {command} ended with {done.returncode}\n{done.stdout}"


def difference(shown: str, printed: str) -> str:
    """Return what of `shown` is not in `printed`, or ""."""
    pattern = "".join(_pattern(part) for part in re.split(r"(\[\.\.\.\]\n?)", shown.rstrip()))
    match = re.fullmatch(pattern, printed.rstrip(), re.DOTALL)
    if match is None:
        return f"shown, but not printed so:\n{_first_odd_line(shown, printed)}"
    wanted = _NUMBER.findall(re.sub(r"\[\.\.\.\]", " ", shown))
    apart = [
        f"{want} shown, {got} printed"
        for want, got in zip(wanted, match.groups(), strict=True)
        if not math.isclose(float(want), float(got), rel_tol=0.2)
    ]
    return "; ".join(apart)


def _pattern(part: str) -> str:
    if part.startswith("[...]"):
        return r".*?"
    words = _NUMBER.split(part)
    return r"([-+]?[\d.]+(?:e[-+]?\d+)?)".join(map(_spaced, words))


def _spaced(words: str) -> str:
    # A number that is one character longer moves its neighbours.
    return re.sub(r"(?:\\ )+", r"\\ +", re.escape(words))


def _first_odd_line(shown: str, printed: str) -> str:
    for line in shown.splitlines():
        if not re.search("".join(map(_pattern, re.split(r"(\[\.\.\.\])", line))), printed, re.DOTALL):
            return line
    return "the lines, but in another order"
