"""The narrowest format for each module, against the limits that PyTorch itself gives."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
import torch
from torch import nn

from nanwatch.fitting import fits
from nanwatch.watch import watch
from toys import Scale

pytest.importorskip("pyarrow")


def test_values_cast_to_the_format_come_back(tmp_path: Path) -> None:
    """What is said to hold all of a module's outputs loses no more than its rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Scale(2.0**k) for k in (-3, 5, 9, 20)))
    kept: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda _, args, out, name=name: kept.setdefault(name, []).append(out))
    with watch(model, trace=tmp_path / "run.parquet"):
        for _ in range(3):
            model(torch.rand(64) + 0.5)
    found = {
        one.module: one for one in fits(tmp_path / "run.parquet") if one.part == "outputs" and one.module
    }
    assert len({one.holds_all for one in found.values()}) > 1
    for name, outputs in kept.items():
        dtype = getattr(torch, found[name].holds_all or "")
        for out in outputs:
            torch.testing.assert_close(out.to(dtype).float(), out, rtol=torch.finfo(dtype).eps, atol=0)


def test_parts_zeros_and_faults(tmp_path: Path) -> None:
    """Weights and outputs apart; integers no part of it; zeros are marked; what was not finite fits nowhere."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), Scale(inf))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
        model[0].bias.copy_(torch.tensor([8.0, 0.0]))
    model.register_buffer("steps", torch.ones((), dtype=torch.int64))
    with watch(model, trace=tmp_path / "run.parquet", on_nonfinite="record"):
        model(torch.tensor([[1.0, 1.0], [-4.0, -1.0]]))
    found = {(one.module, one.part): one for one in fits(tmp_path / "run.parquet")}
    assert set(found) == {
        ("0", "weights"),
        ("0", "outputs"),
        ("1", "outputs"),
        ("2", "outputs"),
        ("", "outputs"),
    }
    weights = found["0", "weights"]
    assert (weights.abs_min, weights.abs_max, weights.has_zero) == (1.0, 8.0, True)
    assert weights.holds_all == "float8_e4m3fn"
    relu = found["1", "outputs"]
    assert (relu.has_zero, relu.abs_min, relu.abs_max) == (True, None, 7.0)
    assert found["2", "outputs"].holds_largest is None
    assert not found["2", "outputs"].isfinite
    assert [one.module for one in fits(tmp_path / "run.parquet")] == ["0", "0", "1", "2", ""]


@pytest.mark.parametrize("bits", [-1, 2000, float("nan")])
def test_a_margin_that_means_nothing_is_refused(tmp_path: Path, bits: float) -> None:
    """The error has the value and what is accepted."""
    with pytest.raises(ValueError, match="accepted are 0 to 1000"):
        fits(tmp_path / "run.parquet", bits)
