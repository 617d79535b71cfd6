"""The narrowest format for each module, against the limits that PyTorch itself gives."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
import torch
from torch import nn

from nanwatch.session.api import watch
from nanwatch.trace.format_advice import FORMATS, fits, holdings
from nanwatch.trace.trace_writer import write_table
from support.toys import Scale

pytest.importorskip("pyarrow")


def test_values_cast_to_the_format_come_back(tmp_path: Path) -> None:
    """A format that is said to hold all outputs of a module loses no more than its rounding."""
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
    assert found["2", "outputs"].holds_all is None
    assert not found["2", "outputs"].isfinite
    assert [one.module for one in fits(tmp_path / "run.parquet")] == ["0", "0", "1", "2", ""]


@pytest.mark.parametrize("bits", [-1, 2000, float("nan")])
def test_a_margin_that_means_nothing_is_refused(tmp_path: Path, bits: float) -> None:
    """The error has the value and what is accepted."""
    with pytest.raises(ValueError, match="accepted are 0 to 1000"):
        fits(tmp_path / "run.parquet", bits)


class Spread(nn.Module):
    """Values over many powers of two, an exact end of each format among them; some are zero."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.rand(1000, dtype=torch.float64) + 1
        made = made * 2.0 ** torch.randint(self.low, self.high, (1000,)) * x
        return torch.cat([made.float(), torch.zeros(7)])


SPREADS = {
    "inside": (-3, 3), "below float16": (-32, 2), "below all": (-160, -140), "above float16": (-3, 18),
    "both": (-30, 20), "narrow": (-12, 4), "wide": (-149, 120),
}  # fmt: skip


def cast_shares(x: torch.Tensor, name: str) -> tuple[float, float, float]:
    """The shares that overflow, become zero and become subnormal, of the elements that are not zero, by a cast."""
    dtype = getattr(torch, name)
    given = x[x != 0].double()
    cast = given.float().to(dtype).double()
    largest = torch.finfo(dtype).max
    # A cast to float8_e4m3fn saturates: what is beyond the middle to the next number, 448 + 16, has overflowed.
    over = (
        given.abs() > 464 if name == "float8_e4m3fn" else cast.isinf() | cast.isnan() | (cast.abs() > largest)
    )
    small = (cast != 0) & (cast.abs() < torch.finfo(dtype).smallest_normal)
    count = max(given.numel(), 1)
    return tuple(float(which.sum()) / count for which in (over, cast == 0, small))  # type: ignore[return-value]


@pytest.mark.parametrize("counts", [True, False])
def test_the_shares_are_those_of_a_cast(tmp_path: Path, counts: bool) -> None:
    """Within the bounds, which counting makes narrow; the verdict follows from the shares and the largest element."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: Spread(*ends) for name, ends in SPREADS.items()})
    made: dict[str, list[torch.Tensor]] = {}
    for name, module in model.items():
        module.register_forward_hook(lambda _, args, out, name=name: made.setdefault(name, []).append(out))
    with watch(model, trace=tmp_path / "run.parquet", counts=counts):
        for _ in range(2):
            for module in model.values():
                module(torch.ones(()))
    for dtype in FORMATS:
        for one in holdings(tmp_path / "run.parquet", dtype):
            if not one.module:
                continue
            both = torch.cat(made[one.module])
            for bounds, true in zip(
                (one.overflow, one.zero, one.subnormal), cast_shares(both, dtype), strict=True
            ):
                assert bounds.least - 1e-9 <= true <= bounds.most + 1e-9, (dtype, one, true)
                assert not counts or bounds.most - bounds.least < 0.15
            assert one.is_counted == counts
            overflow, zero, _ = cast_shares(both, dtype)
            doubled = cast_shares(both * 2, dtype)[0]
            if overflow or doubled:
                assert one.verdict == ("overflows" if overflow else "no room")
            elif counts:
                assert one.fits == (zero <= 0.01), (dtype, one)
            elif one.module == "below all":
                assert one.fits == (dtype == "float32")


@pytest.mark.parametrize(
    "exponents", ["[]", "{", '{"one": 1}', '{"1": -1}', '{"1": 1.5}', '{"9999": 1}', "[" * 100_000]
)
def test_counts_that_are_none_are_refused(tmp_path: Path, exponents: str) -> None:
    """A file is anybody's: a ValueError, which the command prints."""
    model = nn.Linear(2, 2)
    with watch(model, trace=tmp_path / "run.parquet", counts=True):
        model(torch.ones(1, 2))
    pa = pytest.importorskip("pyarrow")
    table = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "run.parquet")
    column = table.schema.get_field_index("exponents")
    damaged = table.set_column(column, "exponents", pa.array([exponents] * table.num_rows, pa.string()))
    write_table(damaged.replace_schema_metadata(table.schema.metadata), tmp_path / "damaged.parquet")
    with pytest.raises(ValueError, match=r"row of a trace|accepted are|invalid literal"):
        holdings(tmp_path / "damaged.parquet", "float16")


def test_a_format_that_is_none_and_a_share_that_is_none_are_refused(tmp_path: Path) -> None:
    """Both name what is accepted."""
    with pytest.raises(ValueError, match="accepted are float8_e4m3fn"):
        holdings(tmp_path / "run.parquet", "int8")
    with pytest.raises(ValueError, match=r"accepted is a share of 0\.0 to 1\.0"):
        holdings(tmp_path / "run.parquet", "float16", lost=2)
