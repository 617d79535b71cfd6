"""SourceFile: the paths of its patches, and spans in an edited text."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanwatch.diagnosis.patching.source import Edit, SourceFile, Span


def edit_of(file: SourceFile, old: str, new: str) -> Edit:
    start = len(file.text[: file.text.index(old)].encode())
    return Edit(Span(start, start + len(old.encode())), new)


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


def test_several_edits_keep_their_places() -> None:
    file = SourceFile("x.py", "value = (a / b) + c / d\n", is_file=False)
    edits = [edit_of(file, "b", "bb.clamp()"), edit_of(file, "c", "(c)")]
    after = file.edited(edits)
    assert after.text == "value = (a / bb.clamp()) + (c) / d\n"
    whole = edit_of(file, "(a / b) + c / d", "").span
    assert after.part(file.moved(whole, edits)) == "(a / bb.clamp()) + (c) / d"
    assert after.part(file.moved(edit_of(file, "d", "").span, edits)) == "d"
