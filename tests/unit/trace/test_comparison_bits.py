"""`nanwatch diff` of traces with fingerprints: the first record whose bits differ, though its range does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.trace.comparison import diff
from nanwatch.trace.trace_file import Trace
from support.architectures import built, inputs_of
from support.watching import watch

pytest.importorskip("pyarrow")


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
