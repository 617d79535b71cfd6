"""Folders under the first free name: `runs`, or `runs.2` where that exists."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_MAX_FOLDERS = 10_000


def make_numbered(folder: Path, make: Callable[[Path], object]) -> Path:
    """Call `make` with the first of `folder`, `folder.2`, `folder.3`, ... that does not exist. Return that path.

    `make` raises OSError when it finds the place taken after all. Raises what `make` raises for another reason, and
    FileExistsError after 9,999 names.
    """
    for number in range(1, _MAX_FOLDERS):
        place = folder if number == 1 else folder.with_name(f"{folder.name}.{number}")
        if os.path.lexists(place):
            continue
        try:
            make(place)
        except OSError:
            # Another process made one of this name in the meantime; any other error comes again.
            if not os.path.lexists(place):
                raise
            continue
        return place
    raise FileExistsError(f"{folder} and {_MAX_FOLDERS - 2:,} more like it exist; delete some")
