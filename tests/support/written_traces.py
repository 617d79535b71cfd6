"""Traces from rows, without a run, for values that no short run makes; and the batches in a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nanwatch.trace import trace_file
from nanwatch.trace.trace_writer import write_table

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

FACTS = {
    "version": trace_file.VERSION,
    "nanwatch": "0",
    "torch": "0",
    "rank": 0,
    "every": 1,
    "lost_frames": 0,
}
_USUAL = {
    "class": "Linear", "label": "output", "role": "output", "shape": "[2]", "dtype": "float16", "abs_min": 0.5,
    "isfinite": True, "phase": "forward", "recomputed": False, "rank": 0,
}  # fmt: skip


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write a trace of these rows, each with batch, call, module and abs_max at least."""
    write_table(pa.Table.from_pylist([_USUAL | row for row in rows], schema=trace_file.schema(FACTS)), path)
    return path


def batches(path: Path) -> list[int]:
    return parquet.read_table(path)["batch"].to_pylist()
