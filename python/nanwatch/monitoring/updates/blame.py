"""Lines of the user's source that are to blame: where an optimizer was made, where a weight was frozen."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FrameType

from ...util.place import Place
from ...util.program_code import frame_values, is_library
from ...util.visible import suppressed, users_frame

_MAX_FRAMES = 64


def place_of(frame: FrameType | None) -> Place | None:
    """Return the line that a frame of the user's is at."""
    user = users_frame(frame)
    return None if user is None else Place(user.f_code.co_filename, user.f_lineno)


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def where_made(value: object) -> Place | None:
    """Return the line at which a variable got this object: the latest assignment before the line that runs."""
    for frame in _users_frames():
        inner = frame_values(frame)
        for names in (inner, frame.f_globals, getattr(inner.get("self"), "__dict__", {})):
            own = {name for name, held in list(names.items()) if held is value}
            if own and (found := _assignment(frame, own)) is not None:
                return found
    return None


def where_called(name: str, is_meant: Callable[[ast.Call], bool] = lambda _: True) -> Place | None:
    """Return the line of a call of a function or method of this name."""
    return _latest(lambda node: isinstance(node, ast.Call) and _called(node) == name and is_meant(node))


def _latest(is_meant: Callable[[ast.stmt | ast.expr], bool]) -> Place | None:
    """Return the latest such line before the one that runs, in the files of the user's stack."""
    for file, now in _users_lines():
        found = [node.lineno for node in _walk(file) if is_meant(node)]
        if found:
            return Place(file, ([line for line in found if line <= now] or found)[-1])
    return None


def _users_lines() -> Iterator[tuple[str, int]]:
    """Yield the files of the user's stack, each with the line that runs there, in the outermost frame of the file."""
    lines: dict[str, int] = {}
    for frame in _users_frames():
        lines[frame.f_code.co_filename] = frame.f_lineno
    yield from lines.items()


def where_frozen(*, is_frozen: bool = True) -> Place | None:
    """Return the line that sets `requires_grad` to False, or to True."""
    value = not is_frozen

    def sets(node: ast.stmt | ast.expr) -> bool:
        if isinstance(node, ast.Call):
            return _called(node) == "requires_grad_" and _says(node, value)
        named = node.targets if isinstance(node, ast.Assign) and _is_constant(node.value, value) else ()
        return any(isinstance(one, ast.Attribute) and one.attr == "requires_grad" for one in named)

    return _latest(sets)


def _says(call: ast.Call, value: bool) -> bool:
    given = (*call.args, *(one.value for one in call.keywords))
    return any(_is_constant(one, value) for one in given) or (value and not given)


def _is_constant(node: ast.expr, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _assignment(frame: FrameType, names: set[str]) -> Place | None:
    file = frame.f_code.co_filename
    found = []
    for node in _walk(file):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if (one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "")) in names:
                    found.append(node.lineno)
    before = [line for line in found if line <= frame.f_lineno]
    return Place(file, (before or found)[-1]) if found else None


def _walk(file: str) -> Iterator[ast.stmt | ast.expr]:
    tree = _tree(file)
    # By line, as ast.walk goes breadth first.
    nodes = [] if tree is None else [one for one in ast.walk(tree) if isinstance(one, ast.stmt | ast.expr)]
    return iter(sorted(nodes, key=lambda one: one.lineno))


def _users_frames() -> Iterator[FrameType]:
    frame = users_frame(sys._getframe(1))
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        # A trainer's source has no line that the user could mend.
        if not is_library(frame.f_code.co_filename):
            yield frame
        frame = users_frame(frame.f_back)


def safely(find: Callable[[], Place | None]) -> str | None:
    """Return a place as text, None where it cannot be told."""
    try:
        found = find()
    except Exception:
        suppressed("a line could not be found")
        return None
    return None if found is None else str(found)
