"""SourceFile.patch: `git apply` turns the file into the edited one, whatever its bytes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nanwatch.diagnosis.patching.source import Edit, SourceFile, Span

LINES = [f"line{i} = {i}" for i in range(12)]


@pytest.mark.parametrize("where", ["", "package/inner"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["unix", "dos"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "no newline at the end"])
@pytest.mark.parametrize("line", [0, 6, 11])
def test_git_applies_it(tmp_path: Path, where: str, ending: str, last: bool, line: int) -> None:
    """In a folder of the work tree, at both ends of the file, and with characters of several bytes before it."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    path = tmp_path / where / "program.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [*LINES[:line], f"größe = 'ä' + {line} * 1", *LINES[line + 1 :]]
    raw = (ending.join(lines) + (ending if last else "")).encode()
    path.write_bytes(raw)
    file = SourceFile.load(str(path))
    assert file is not None
    start = len(file.text[: file.text.index(f"{line} * 1")].encode())
    edit = Edit(Span(start, start + len(f"{line} * 1")), "(ü := 7)")
    patch = file.patch(file.edited([edit]))
    (tmp_path / "cure.patch").write_bytes(patch.encode())
    subprocess.run(["git", "apply", "cure.patch"], cwd=tmp_path, check=True)
    assert path.read_bytes() == raw.replace(f"{line} * 1".encode(), "(ü := 7)".encode())
