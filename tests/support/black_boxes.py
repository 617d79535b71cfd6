"""Black boxes that tests make: one in this process, and copies that say something else."""

import atexit
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from nanwatch.blackbox import process
from nanwatch.blackbox.process import ProcessBox, open_box
from nanwatch.numerics import _extension

needs_box = pytest.mark.skipif(_extension.C is None, reason="no compiled part")


@contextlib.contextmanager
def black_box(folder: Path, stall_timeout: float | None = None) -> Iterator[ProcessBox]:
    """Open a black box of this process for the watches that begin inside, in the place of the one that it may have."""
    with mock.patch.object(process, "_process", None), mock.patch.object(process, "_has_failed", False):
        box = open_box(folder, stall_timeout)
        try:
            yield box
        finally:
            atexit.unregister(box._exits)
            box._ended.set()
            box._thread.join()
            _extension.C.BlackBox.close()


def other(path: Path, copy: Path, **facts: str) -> Path:
    """Copy a black box into one whose facts are others of the same length, such as rank="1" for rank 0."""
    data = path.read_bytes()
    for name, value in facts.items():
        new, count = re.subn(
            rb'("%s": )(?:\d+|"[^"]*")' % name.encode(), rb"\g<1>" + value.encode(), data, count=1
        )
        assert (count, len(new)) == (1, len(data)), name
        data = new
    copy.write_bytes(data)
    return copy
