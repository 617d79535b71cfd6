"""A log in a run of W&B: the real package in offline mode, its file read back."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nanwatch
from support.processes import until
from support.toys import Scale, mlp
from support.watching import watch

# LevelDB's log format, behind seven bytes of W&B's own.
_HEAD = 7  # of the file; and of each piece: checksum, length, kind
_BLOCK = 32 * 1024
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[bytes]:
    """Each whole record, as it was written; the checksums are not looked at."""
    data = path.read_bytes()
    assert data[:4] in (b":W&B", b"")
    at, whole = _HEAD, b""
    while at + _HEAD <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEAD])
        piece = data[at + _HEAD : at + _HEAD + length]
        if len(piece) < length:
            return
        at += _HEAD + length
        whole = piece if kind in (_FULL, _FIRST) else whole + piece
        if kind in (_FULL, _LAST):
            yield whole


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A run that talks to nobody."""
    wandb = pytest.importorskip("wandb", reason="needs W&B: pip install wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(console="off")
    begun = wandb.init(project="nanwatch", mode="offline", dir=str(tmp_path), settings=settings)
    yield begun
    begun.finish()


def history(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """The rows of a run that was finished: step, and values by name."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    entries = lambda: [wandb_internal_pb2.Record.FromString(data) for data in records(file)]  # noqa: E731
    # W&B's own process writes it, and may not be done when finish() returns.
    until(lambda: (entries() or [wandb_internal_pb2.Record()])[-1].HasField("exit"), 60)
    rows = []
    for record in entries():
        if record.HasField("history"):
            items = record.history.item
            values = {x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in items}
            rows.append((record.history.step.num, values))
    return rows


@pytest.mark.slow
def test_entries_go_with_the_users_own_rows(run: Any, tmp_path: Path) -> None:
    """No row and no step is added, and none of the user's is lost; the batch is the x axis of what is nanwatch's."""
    model = mlp()
    with watch(model, sinks=run, log_every=4, forecast=False):
        for i in range(9):
            model(torch.ones(1, 3))
            run.log({"loss": float(i)}, step=10 * i)
    run.finish()
    rows = history(tmp_path)
    assert [(step, row["loss"]) for step, row in rows] == [(10 * i, float(i)) for i in range(9)]
    ours = [row for _, row in rows if "nanwatch/batch" in row]
    # How many more there are is a matter of time: an entry that took long is followed by a pause.
    assert ours[0]["nanwatch/batch"] == 0
    assert ours[0]["nanwatch/is_finite"] == 1
    assert ours[0]["nanwatch_headroom_bits/(root)"] > 100


@pytest.mark.slow
def test_its_name_stands_for_its_run_and_a_fault_outlives_it(run: Any, tmp_path: Path) -> None:
    """sinks="wandb" is the module; the flag of a fault is in the file though the script logs nothing after it."""
    model = torch.nn.Sequential(Scale(float("inf")))
    with watch(model, sinks="wandb"), pytest.raises(nanwatch.NonFiniteError):
        model(torch.ones(1))
    run.finish()
    (row,) = [row for _, row in history(tmp_path) if "nanwatch/is_finite" in row]
    assert (row["nanwatch/is_finite"], row["nanwatch/batch"]) == (0, 0)
    assert "inf" in row["nanwatch/finding"]
