"""The compiled part, and what type checkers know of it."""

import ast
from pathlib import Path
from unittest import mock

import pytest

import nanwatch
from nanwatch.numerics import _extension
from nanwatch.recording.events import Settings
from nanwatch.recording.recorder import PythonRecorder

STUB = ast.parse(Path(nanwatch.__file__).with_name("_C.pyi").read_text(encoding="utf-8"))
PYTHONS = {*dir(object), "__doc__", "__module__", "__dict__", "__weakref__", "__init__"}


def declared(body: list[ast.stmt]) -> set[str]:
    """The names that these statements of the stub define."""
    functions = {one.name for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    return functions | {
        one.target.id for one in body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }


def attributes(kind: type) -> set[str]:
    return {name for name in vars(kind) if name not in PYTHONS and not name.startswith("_pybind")}


@pytest.mark.skipif(_extension.C is None, reason="without the compiled part")
def test_the_stub_declares_what_the_compiled_part_has() -> None:
    """Each function, class and attribute, neither more nor fewer: mypy sees calls of the compiled part through it.

    The recorder has those of the recorder in Python, but for what the wrapper in Python calls.
    """
    assert declared(STUB.body) == {name for name in vars(_extension.C) if not name.startswith("_")}
    for node in STUB.body:
        if isinstance(node, ast.ClassDef) and node.name != "CallRecorder":
            assert declared(node.body) - {"__init__"} == attributes(getattr(_extension.C, node.name))
    public = {name for name in dir(PythonRecorder(Settings(), mock.Mock())) if not name.startswith("_")}
    assert public - {"enter", "leave"} == attributes(_extension.C.CallRecorder)
