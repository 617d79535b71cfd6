"""exchanged: an edited function runs for this thread and for a time; every other call runs what it ran before."""

from __future__ import annotations

import ast
import importlib.util
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest

from nanwatch.diagnosis.diagnosis import Expression
from nanwatch.diagnosis.patching.code_swap import Probe, exchanged, find_target
from nanwatch.diagnosis.patching.source import Edit, Span, Target

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

async def later(x):
    return x + 7  # coroutine
'''


@pytest.fixture
def program(tmp_path: Path) -> Iterator[ModuleType]:
    path = tmp_path / "program.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("program_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("program_under_test", None)


def place_of(program: ModuleType, mark: str) -> Expression:
    """The marked line, with the code of the function that ran it."""
    line = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if text.endswith(f"# {mark}"))
    codes: list[CodeType] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename == program.__file__ and event == "line" and frame.f_lineno == line:
            codes.append(frame.f_code)
        return trace

    sys.settrace(trace)
    try:
        CALLS[mark](program)
    finally:
        sys.settrace(None)
    program.total = 0  # type: ignore[attr-defined]
    program.existing = program.maker(1)  # type: ignore[attr-defined]
    return Expression(str(program.__file__), line, None, codes[0])


def target_of(program: ModuleType, mark: str) -> tuple[Target, Edit]:
    """The function at the marked line, and the edit that doubles what its line computes."""
    line = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if text.endswith(f"# {mark}"))
    target = find_target(place_of(program, mark))
    assert isinstance(target, Target), target
    text = SOURCE.splitlines()[line - 1]
    start = text.index("super") if "super" in text else text.index(" + ") - 1
    end = text.index("  #")
    base = sum(len(one) + 1 for one in SOURCE.splitlines()[: line - 1])
    return target, Edit(Span(base + start, base + end), f"100 * ({text[start:end]})")


def later_value(program: ModuleType, x: int) -> int:
    coroutine = program.later(x)
    with pytest.raises(StopIteration) as stopped:
        coroutine.send(None)
    value: int = stopped.value.value
    return value


CALLS: dict[str, Callable[[ModuleType], object]] = {
    "method": lambda p: p.Kind().value(2),
    "closure": lambda p: p.existing(2),
    "generator": lambda p: list(p.numbers(2)),
    "lambda": lambda p: p.double(2),
    "local": lambda p: p.outer(2),
    "coroutine": lambda p: later_value(p, 2),
}
EXPECTED = {
    "method": (7, 700),
    "closure": (3, 400),
    "generator": ([2, 3], [200, 300]),
    "lambda": (4, 400),
    "local": (3, 300),
    "coroutine": (9, 900),
}


@pytest.mark.parametrize("kind", list(CALLS))
def test_each_kind_of_function_is_exchanged_and_put_back(program: ModuleType, kind: str) -> None:
    """Globals, free variables, super() and private names stay what they are in the edited body."""
    program.existing = program.maker(1)  # type: ignore[attr-defined]
    before, inside = EXPECTED[kind]
    target, edit = target_of(program, kind)
    assert CALLS[kind](program) == before
    codes = [one.__code__ for one in target.functions]
    with exchanged(target, target.file.edited([edit]), (), Probe()):
        assert CALLS[kind](program) == inside
    assert [one.__code__ for one in target.functions] == codes
    if kind == "closure":
        assert program.existing(0) == 3  # its count went on in both
    if kind == "method":
        assert program.total == 2


def test_other_threads_run_what_they_ran_before(program: ModuleType) -> None:
    """A thread that calls the function meanwhile is no part of the trial, also in the midst of a call."""
    target, edit = target_of(program, "method")
    seen: list[object] = []
    with exchanged(target, target.file.edited([edit]), (), Probe()):
        thread = threading.Thread(target=lambda: seen.append(program.Kind().value(2)))
        thread.start()
        thread.join()
        assert program.Kind().value(2) == 700
    assert seen == [7]


def test_the_probe_sees_the_edited_expression(program: ModuleType) -> None:
    """Its values are those of the outermost expression in the span, each time it is evaluated."""
    target, edit = target_of(program, "generator")
    file = target.file.edited([edit])
    probe = Probe()
    with exchanged(target, file, [target.file.moved(edit.span, [edit])], probe):
        list(program.numbers(1))
    assert probe.values == {0: [100, 200]}


def test_a_file_that_has_changed_is_left_alone(program: ModuleType) -> None:
    """A patch of what is no longer there would be wrong; also where only a number differs."""
    path, places = (
        Path(str(program.__file__)),
        {mark: place_of(program, mark) for mark in ("lambda", "local")},
    )
    path.write_text(SOURCE.replace("x + x", "x + 7").replace("y + 1", "y + 2"))
    for mark in ("lambda", "local"):
        found = find_target(places[mark])
        assert isinstance(found, str)
        assert "edited since" in found


def test_a_notebook_cell_is_what_runs() -> None:
    """IPython compiles each statement alone, which makes other code of a method of an imported name."""
    text = "import math\ndef root(x):\n    return math.sqrt(x)\n"
    linecache.cache["<cell 1>"] = (len(text), None, text.splitlines(keepends=True), "<cell 1>")
    names: dict[str, Any] = {}
    try:
        for statement in ast.parse(text).body:
            exec(compile(ast.Module([statement], []), "<cell 1>", "exec"), names)
        target = find_target(Expression("<cell 1>", 3, None, names["root"].__code__))
    finally:
        del linecache.cache["<cell 1>"]
    assert isinstance(target, Target), target
    edited = target.file.edited([Edit(Span(text.index("sqrt"), text.index("sqrt") + 4), "exp")])
    with exchanged(target, edited, (), Probe()):
        assert names["root"](0.0) == 1.0
    assert names["root"](0.0) == 0.0
