"""`nanwatch diff` of traces with fingerprints: the first record whose bits differ, though its range does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.records.note import MeshPlace, Note, Placement
from nanwatch.records.record import Frame, Record
from nanwatch.trace import columns
from nanwatch.trace.comparison import diff
from nanwatch.trace.trace_file import Trace
from support.architectures import built, inputs_of
from support.watching import watch

parquet = pytest.importorskip("pyarrow.parquet")


def run(path: Path, model: nn.Module, inputs: dict[str, Any], **options: Any) -> Path:
    """The path of a trace of two batches."""
    with watch(model, trace=path, on_nonfinite="record", fingerprints=True, **options), torch.no_grad():
        for _ in range(2):
            model(**inputs)
    return path


def swapped(x: Tensor) -> None:
    """Two elements change places: the range stays."""
    flat = x.reshape(-1)
    other = int((flat != flat[0]).nonzero()[0])
    flat[0], flat[other] = flat[other].item(), flat[0].item()


def one_ulp(x: Tensor) -> None:
    """The element nearest to the middle of the range moves by one unit in the last place."""
    x.reshape(-1)[1] = torch.nextafter(x.reshape(-1)[1], torch.tensor(torch.inf))


@pytest.mark.parametrize("change", [swapped, one_ulp])
def test_the_first_tensor_that_was_changed_is_named(tmp_path: Path, change: Any) -> None:
    """In each of the linear layers of a GPT-2. Without fingerprints their weights are equal."""
    torch.manual_seed(0)
    model, inputs = built("gpt2").eval(), inputs_of("gpt2", 0)
    before = run(tmp_path / "a.parquet", model, inputs)
    again = diff(before, run(tmp_path / "same.parquet", model, inputs))
    assert not again.differs
    tensors = Trace.open(before).table(["dtype"])["dtype"].is_valid().to_numpy().sum()
    assert again.num_bits == tensors > 50
    modules = [name for name, module in model.named_modules() if name.endswith(("c_fc", "c_attn"))]
    assert modules
    for name in modules:
        weight = model.get_submodule(name).weight
        kept = weight.detach().clone()
        with torch.no_grad():
            change(weight)
        after = run(tmp_path / f"{name}.parquet", model, inputs)
        with torch.no_grad():
            weight.copy_(kept)
        found = diff(before, after)
        assert found.first is not None
        assert (found.first.batch, found.first.module, found.first.label) == (0, name, "weight")
        assert (found.first.kind, found.first.what[:27]) == ("bits", "other bits in the same rang")
        by_range = diff(before, after, ignore=["bits"])
        assert by_range.first is None or by_range.first.label != "weight"


FACTS = {"version": columns.VERSION, "nanwatch": "0", "torch": "0", "every": 1, "lost_frames": 0}


def row(
    label: str, bits: int | None, high: float = 1.0, role: Any = None, note: Note | None = None
) -> Record:
    role = role or label.partition("[")[0]
    return Record(label, role, (2,), "float32", 0.5, high, high < torch.inf, None, note, bits)


def written(path: Path, *rows: Record, rank: int = 0, batches: int = 1, phase: Any = "forward") -> Path:
    """A trace with a frame of these rows in each of the batches."""
    frames = [Frame(batch, "m", "M", tuple(rows), phase) for batch in range(batches)]
    table = columns.Tabulator(rank).table(frames)
    facts = {**FACTS, "rank": rank}
    parquet.write_table(table.replace_schema_metadata(columns.schema(facts).metadata), path)
    return path


def shard(start: int, *places: MeshPlace) -> Note:
    return Note("local_shard", placement=Placement(places, (start,)))


@pytest.mark.parametrize(
    ("label", "role", "notes", "is_compared"),
    [
        ("weight", "weight", (None, None), True),
        ("exp_avg[weight]", "buffer", (None, None), True),
        ("input[0]", "input", (None, None), False),
        ("weight.grad", "gradient", (None, None), False),
        ("weight", "weight", (Note("local_shard"), Note("local_shard")), False),
        (
            "weight",
            "weight",
            (shard(0, MeshPlace("Shard(0)", "dp", 0, 2)), shard(2, MeshPlace("Shard(0)", "dp", 1, 2))),
            False,
        ),
        (
            "weight",
            "weight",
            (
                shard(2, MeshPlace("Replicate", "dp", 0, 2), MeshPlace("Shard(0)", "tp", 1, 2)),
                shard(2, MeshPlace("Replicate", "dp", 1, 2), MeshPlace("Shard(0)", "tp", 1, 2)),
            ),
            True,
        ),
    ],
)
def test_two_ranks_share_weights_and_optimizer_state(
    tmp_path: Path, label: str, role: str, notes: tuple[Note | None, Note | None], is_compared: bool
) -> None:
    """Inputs, outputs and gradients differ between replicas, and so do the shards of a weight."""
    phase = "step" if label.startswith("exp") else "forward"
    paths = [
        written(tmp_path / f"{rank}.parquet", row(label, rank, 1 + rank, role, note), rank=rank, phase=phase)
        for rank, note in enumerate(notes)
    ]
    found = diff(*paths)
    assert found.differs == is_compared
    assert found.num_records == is_compared
    assert "ranks 0 and 1" in found.remarks[0]
    same_rank = written(tmp_path / "c.parquet", row(label, 7, 2.0, role, notes[0]), phase=phase)
    assert diff(paths[0], same_rank).differs
