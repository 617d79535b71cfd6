"""SourceFile.patch: `git apply` turns the file into the edited one, whatever its bytes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nanwatch.diagnosis.source_file import Edit, SourceFile, Span

LINES = [f"line{i} = {i}" for i in range(12)]


def edit_of(file: SourceFile, old: str, new: str) -> Edit:
    start = len(file.text[: file.text.index(old)].encode())
    return Edit(Span(start, start + len(old.encode())), new)


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
    edit = edit_of(file, f"{line} * 1", "(ü := 7)")
    patch = file.patch(file.edited([edit]))
    (tmp_path / "cure.patch").write_bytes(patch.encode())
    subprocess.run(["git", "apply", "cure.patch"], cwd=tmp_path, check=True)
    assert path.read_bytes() == raw.replace(f"{line} * 1".encode(), "(ü := 7)".encode())


def test_outside_git_the_path_is_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "inner" / "program.py"
    path.parent.mkdir()
    path.write_text("a = 1\n")
    file = SourceFile.load(str(path))
    assert file is not None
    after = file.edited([edit_of(file, "1", "2")])
    monkeypatch.chdir(tmp_path)
    assert file.patch(after).startswith("--- a/inner/program.py\n+++ b/inner/program.py\n")
    monkeypatch.chdir("/")
    assert file.patch(after).splitlines()[0].endswith(str(path)[1:])
    monkeypatch.chdir(Path.home())
    assert file.patch(after).startswith("--- a/program.py\n")


def test_a_notebook_cell_has_no_patch() -> None:
    file = SourceFile("<cell>", "a = 1\n", is_file=False)
    assert file.patch(file.edited([edit_of(file, "1", "2")])) == ""


def test_several_edits_keep_their_places() -> None:
    file = SourceFile("x.py", "value = (a / b) + c / d\n", is_file=False)
    edits = [edit_of(file, "b", "bb.clamp()"), edit_of(file, "c", "(c)")]
    after = file.edited(edits)
    assert after.text == "value = (a / bb.clamp()) + (c) / d\n"
    whole = edit_of(file, "(a / b) + c / d", "").span
    assert after.part(file.moved(whole, edits)) == "(a / bb.clamp()) + (c) / d"
    assert after.part(file.moved(edit_of(file, "d", "").span, edits)) == "d"
