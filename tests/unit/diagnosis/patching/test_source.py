"""SourceFile: the paths of its patches, and spans in an edited text."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import nanwatch
from nanwatch.diagnosis.patching.source import Edit, SourceFile, Span, first_line, nodes_at

DECORATED = """\
@first
@second(
    lambda x: x,
)
class A:
    @third
    def f(self, y=lambda: 0):
        try:
            a = 1; b = 2
        except (ValueError,
                TypeError) as error:
            raise
        else:
            match y:
                case [1,
                      *_]:
                    return (a
                            + b)
        finally: pass
    async def g(self): return [
        lambda: 1 for _ in range(2)
    ]
"""
SOURCES = [DECORATED, *(path.read_text() for path in Path(nanwatch.__file__).parent.glob("diagnosis/*.py"))]


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


@pytest.mark.parametrize("text", SOURCES)
def test_a_line_has_the_nodes_that_a_walk_over_the_whole_tree_finds(text: str) -> None:
    """Those with a place on the line, decorators included, and none of a statement that is elsewhere."""
    file = SourceFile("x.py", text, is_file=False)
    everything = [one for one in ast.walk(file.tree) if isinstance(one, ast.stmt | ast.expr)]
    spans = {one: (first_line(one), one.end_lineno) for one in everything}
    for line in range(1, text.count("\n") + 1):
        found = set(nodes_at(file.tree, line))
        assert {one for one, (start, end) in spans.items() if start <= line <= end} <= found
        assert not {
            one for one in found if isinstance(one, ast.stmt) and not spans[one][0] <= line <= spans[one][1]
        }
        covering = [x for x in everything if isinstance(x, ast.stmt) and x.lineno <= line <= spans[x][1]]
        innermost = {
            x for x in covering if not any(x is not y and file.span(x).covers(file.span(y)) for y in covering)
        }
        assert set(file.statements(line)) == innermost
