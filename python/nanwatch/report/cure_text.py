"""The text of a cure: its verdict, and the lines of source that it changes."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from .finding import Cure

Kind: TypeAlias = Literal["head", "same", "old", "new"]
_KINDS: dict[str, Kind] = {"-": "old", "+": "new", " ": "same"}


def patch_lines(cure: Cure) -> list[tuple[Kind, str]]:
    """Return the lines of the patch, or of the code to write, each with its part in the change."""
    if not cure.patch:
        return [("new", f"+{line}") for line in _lines(cure.code)]
    lines: list[tuple[Kind, str]] = []
    is_hunk = False
    for line in _lines(cure.patch):
        # The header has lines with the same signs.
        is_hunk = line.startswith("@@") or (is_hunk and not line.startswith(("diff ", "index ")))
        kind = _KINDS.get(line[:1], "head") if is_hunk else "head"
        lines.append((kind, line.expandtabs(4)))
    return lines


def changed_lines(cure: Cure) -> list[str]:
    """Return what the cure takes out and puts in, as lines of a text report."""
    changed = [line for kind, line in patch_lines(cure) if kind in ("old", "new")]
    code = _lines(textwrap.dedent("".join(f"{line[1:]}\n" for line in changed)))
    return [f"       {line[0]} {text}" for line, text in zip(changed, code, strict=True)]


def _lines(text: str) -> list[str]:
    # splitlines() would also end a line at characters that may stand in a string of the source, such as U+2028.
    return text.removesuffix("\n").split("\n") if text else []
