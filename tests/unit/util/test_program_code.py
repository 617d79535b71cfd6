"""Names in the code of a program, and which files are the program's."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from nanwatch.util.program_code import frame_values, is_library, names_of

SOURCE = """
def outer(self, x):
    global total
    total = self.step + helper(x)
    def inner():
        return deeper
    return inner
"""


def test_names_are_those_of_the_code_and_of_functions_inside() -> None:
    """Globals and attributes, mentioned or assigned."""
    assert {"total", "step", "helper", "deeper"} <= names_of(compile(SOURCE, "train.py", "exec"))


def test_values_of_a_frame_are_its_locals() -> None:
    """Asked twice, the second time sees what was bound since."""
    first = frame_values(sys._getframe())
    bound = object()
    second = frame_values(sys._getframe())
    assert "bound" not in first
    assert second["bound"] is bound


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (json.__file__, True),
        (torch.nn.functional.__file__, True),
        ("<frozen importlib._bootstrap>", True),
        ("/somewhere/site-packages/pack/age.py", True),
        ("/home/user/train.py", False),
        (__file__, False),
    ],
)
def test_which_files_are_the_programs(file: str, expected: bool) -> None:
    """Python, torch and installed packages are not."""
    assert is_library(file) == expected
