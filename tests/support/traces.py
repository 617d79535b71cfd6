"""Waiting for the writer of a trace, and the batches in its file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

parquet = pytest.importorskip("pyarrow.parquet")


def until(condition: Any) -> None:
    """Wait for something that the thread does."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def batches(path: Path) -> list[int]:
    return parquet.read_table(path)["batch"].to_pylist()
