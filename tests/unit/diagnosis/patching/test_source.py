"""An edited function runs for this thread and for a time; patches have their paths, and spans their places."""

from __future__ import annotations

import ast
import importlib.util
import linecache
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from nanwatch.diagnosis.patching.source import (
    Edit,
    Probe,
    SourceFile,
    Span,
    Target,
    exchanged,
    find_target,
    moved,
)
from nanwatch.diagnosis.provenance import Expression

SOURCE = '''\
import functools
total = 0

def decorate(f):
    @functools.wraps(f)
    def inner(*args):
        return f(*args)
    return inner

class Base:
    def value(self, x):
        return x

class Kind(Base):
    __secret = 5

    @decorate
    def value(self, x):
        """A docstring."""
        global total
        total += 1
        return super().value(x) + self.__secret  # method

def maker(step):
    count = 0
    def counter(x):
        nonlocal count
        count += step
        return x + count  # closure
    return counter

def numbers(x):
    for i in range(2):
        yield x + i  # generator

double = lambda x: x + x  # lambda

def outer(x):
    def local(y):
        return y + 1  # local
    return local(x)

existing = maker(1)
'''


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """The source as a module of its own."""
    path = tmp_path / "program.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("program_under_test", path)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# For each kind of function: its code, a call that runs it, and the results before and in the exchange.
KINDS: dict[str, tuple[Callable[[Any], CodeType], Callable[[Any], object], object, object]] = {
    "method": (lambda p: p.Kind.value.__wrapped__.__code__, lambda p: p.Kind().value(2), 7, 700),
    "closure": (lambda p: p.existing.__code__, lambda p: p.existing(2), 3, 400),
    "generator": (lambda p: p.numbers.__code__, lambda p: list(p.numbers(2)), [2, 3], [200, 300]),
    "lambda": (lambda p: p.double.__code__, lambda p: p.double(2), 4, 400),
    "local": (lambda p: p.outer.__code__.co_consts[1], lambda p: p.outer(2), 3, 300),
}


def place_of(program: ModuleType, kind: str) -> Expression:
    line = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if text.endswith(f"# {kind}"))
    return Expression(str(program.__file__), line, None, KINDS[kind][0](program))


def target_of(program: ModuleType, kind: str) -> tuple[Target, Edit]:
    """Return the function at the marked line, and the edit that makes its line return a hundredfold."""
    place = place_of(program, kind)
    target = find_target(place)
    assert isinstance(target, Target), target
    lines = SOURCE.splitlines()
    text = lines[place.line - 1]
    start = text.index("super") if "super" in text else text.index(" + ") - 1
    end, base = text.index("  #"), sum(len(line) + 1 for line in lines[: place.line - 1])
    return target, Edit(Span(base + start, base + end), f"100 * ({text[start:end]})")


@pytest.mark.parametrize("kind", list(KINDS))
def test_each_kind_of_function_is_exchanged_and_put_back(program: ModuleType, kind: str) -> None:
    """Globals, free variables, super() and private names stay what they are, and the probe sees the expression."""
    _, call, before, inside = KINDS[kind]
    target, edit = target_of(program, kind)
    assert call(program) == before
    codes = [function.__code__ for function in target.functions]
    probe = Probe()
    with exchanged(target, target.file.edited([edit]), [moved(edit.span, [edit])], probe):
        assert call(program) == inside
    assert [function.__code__ for function in target.functions] == codes
    assert probe.values == {0: inside if kind == "generator" else [inside]}
    if kind == "closure":
        assert program.existing(0) == 3  # its count went on in both
    if kind == "method":
        assert program.total == 2


def test_other_threads_run_what_they_ran_before(program: ModuleType) -> None:
    """A thread that calls the function meanwhile is no part of the trial."""
    target, edit = target_of(program, "method")
    with exchanged(target, target.file.edited([edit]), (), Probe()), ThreadPoolExecutor(1) as pool:
        assert (pool.submit(program.Kind().value, 2).result(), program.Kind().value(2)) == (7, 700)


def test_a_file_that_has_changed_is_left_alone(program: ModuleType) -> None:
    """A patch of what is no longer there would be wrong; also where only a number differs."""
    places = [place_of(program, kind) for kind in ("lambda", "local")]
    Path(str(program.__file__)).write_text(SOURCE.replace("x + x", "x + 7").replace("y + 1", "y + 2"))
    for place in places:
        assert "edited since" in str(find_target(place))


def test_a_notebook_cell_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython compiles each statement alone, which makes other code of a method of an imported name."""
    text, names = "import math\ndef root(x):\n    return math.sqrt(x)\n", dict[str, Any]()
    cell = len(text), None, text.splitlines(keepends=True), "<cell 1>"
    monkeypatch.setitem(linecache.cache, "<cell 1>", cell)
    for statement in ast.parse(text).body:
        exec(compile(ast.Module([statement], []), "<cell 1>", "exec"), names)
    target = find_target(Expression("<cell 1>", 3, None, names["root"].__code__))
    assert isinstance(target, Target), target
    edited = target.file.edited([Edit(Span(text.index("sqrt"), text.index("sqrt") + 4), "exp")])
    with exchanged(target, edited, (), Probe()):
        assert names["root"](0.0) == 1.0
    assert names["root"](0.0) == 0.0


def edit_of(file: SourceFile, old: str, new: str) -> Edit:
    start = len(file.text[: file.text.index(old)].encode())
    return Edit(Span(start, start + len(old.encode())), new)


def test_outside_git_paths_are_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "inner" / "program.py"
    path.parent.mkdir()
    path.write_text("a = 1\n")
    file = SourceFile.load(str(path))
    after = file.edited([edit_of(file, "1", "2")])
    monkeypatch.chdir(tmp_path)
    assert file.patch(after).startswith("--- a/inner/program.py\n+++ b/inner/program.py\n")
    monkeypatch.chdir("/")
    assert file.patch(after).splitlines()[0].endswith(str(path)[1:])
    monkeypatch.chdir(Path.home())
    assert file.patch(after).startswith("--- a/program.py\n")


def test_several_edits_keep_their_places() -> None:
    file = SourceFile("x.py", "value = (a / b) + c / d\n")
    edits = [edit_of(file, "b", "bb.clamp()"), edit_of(file, "c", "(c)")]
    after = file.edited(edits)
    assert after.text == "value = (a / bb.clamp()) + (c) / d\n"
    whole = edit_of(file, "(a / b) + c / d", "").span
    assert after.part(moved(whole, edits)) == "(a / bb.clamp()) + (c) / d"
    assert after.part(moved(edit_of(file, "d", "").span, edits)) == "d"
