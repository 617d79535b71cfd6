"""Rules of the folder tests: who imports what, and what a unit test does without."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import check_names
import check_sizes
from support.paths import ROOT, TESTS

FILES = sorted(TESTS.rglob("*.py"))
UNIT = sorted((TESTS / "unit").rglob("*.py"))
FOLDERS = {"compile", "distributed", "gpu", "integration", "native", "programs", "slow", "thirdparty", "unit"}
HEAVY = {"transformers", "lightning", "accelerate", "support.architectures"}
ARCHITECTURES = {"support.architectures"}  # what is true of traces and of memory has to be true of real ones
EXCEPTIONS = {
    "unit/precision/test_precision.py": {"transformers"},  # for one container of its
    "unit/session/test_api.py": ARCHITECTURES,
    "unit/trace/test_comparison.py": ARCHITECTURES,
    "unit/trace/test_comparison_bits.py": ARCHITECTURES,
}


def name(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, wherever in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_nothing_imports_a_test_file() -> None:
    """Code that tests share is in `support`; scripts in strings count too."""
    files = {path.stem for path in FILES if path.stem.startswith("test_") or path.stem == "conftest"}
    script = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(sorted(files))})\b", re.MULTILINE)
    faults = [
        (name(path), module)
        for path in FILES
        for module in {*imported(path), *script.findall(path.read_text(encoding="utf-8"))}
        if files & set(re.findall(r"\w+", module))
    ]
    assert not faults


def test_every_test_file_has_a_room() -> None:
    """A unit's test is in a folder of its package; no test but this one lies beside the folders."""
    rooms = {path.parent.name for path in (ROOT / "python" / "nanwatch").glob("*/__init__.py")}
    files = {path for path in FILES if path.stem.startswith("test_")} - {Path(__file__)}
    places = {path.relative_to(TESTS).parts[:-1] for path in files}
    assert () not in places
    assert {place[0] for place in places} == FOLDERS
    assert {place[1] for place in places if place[0] == "unit"} <= rooms


def test_unit_tests_are_light() -> None:
    """No package of others' models; a function that compiles a model has the marker."""
    heavy = {}
    for path in UNIT:
        modules = {*imported(path), *(module.partition(".")[0] for module in imported(path))}
        if modules & HEAVY:
            heavy[name(path)] = modules & HEAVY
    assert heavy == EXCEPTIONS
    unmarked = [
        (name(path), function.name)
        for path in UNIT
        for function in tree(path).body
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_")
        if "torch.compile(" in ast.unparse(function)
        if "pytest.mark.compile" not in map(ast.unparse, function.decorator_list)
    ]
    assert not unmarked


def test_tests_are_found_by_the_names_of_modules() -> None:
    """The longest name counts, a private module's without its underscore, and only in the room of the test."""
    known = {"trace/trace", "trace/trace_file", "numerics/_spread"}
    tests = ["trace/test_trace", "trace/test_trace_file_old", "numerics/test_spread", "numerics/test_trace"]
    found = [check_names.module_of(TESTS / f"{test}.py", known, test.partition("/")[0]) for test in tests]
    assert found == ["trace/trace", "trace/trace_file", "numerics/_spread", None]
    assert check_names.faults() == []


def test_module_without_tests_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    known = check_names.modules()
    monkeypatch.setattr(check_names, "modules", lambda: {*known, "trace/unknown"})
    monkeypatch.setitem(check_names.ELSEWHERE, "unit/trace/test_gone.py", ("trace/gone",))
    assert check_names.faults() == [
        "python/nanwatch/trace/unknown.py: no tests/unit/trace/test_unknown.py",
        "ELSEWHERE: trace/gone is gone, or has tests of its own",
        "ELSEWHERE: tests/unit/trace/test_gone.py is gone",
    ]


def test_a_room_that_is_too_large_is_told() -> None:
    """And one without a limit, and one that is gone."""
    told = check_sizes.faults(Counter({"trace": 11, "new": 1}), {"trace": 10, "old": 5})
    assert [line.partition(":")[0] for line in told] == ["trace", "new", "old"]
    assert check_sizes.faults(Counter({"trace": 10}), {"trace": 10}) == []
