"""Place in source code."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Line of a source file, and the columns of an expression in it: the first, and that behind the last.

    Columns are bytes from 0, as `code.co_positions()` has them, or None where they are not known.

    Examples:
        >>> from nanwatch.util.place import Place
        >>> str(Place("model.py", 12))
        'model.py:12'
    """

    file: str
    line: int
    columns: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def short(self) -> str:
        """The place as a person knows it: without the folder of a package that is installed."""
        return str(self).rpartition("site-packages/")[2]
