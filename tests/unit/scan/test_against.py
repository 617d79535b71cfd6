"""Two checkpoints side by side: planted changes and conversions, measured against float64."""

import pytest
import torch
from safetensors.torch import save_file

import nanwatch


@pytest.fixture
def weights():
    torch.manual_seed(0)
    projections = {f"layers.{i}.{part}.weight": torch.randn(12, 8) for i in range(2) for part in "qkv"}
    return projections | {"norm": torch.ones(8)}


def compared(a, b, folder):
    """Return the scan of the first of two dicts of tensors against the second."""
    save_file(a, folder / "a.safetensors")
    save_file(b, folder / "b.safetensors")
    return nanwatch.scan(folder / "a.safetensors", against=folder / "b.safetensors")


def test_a_change_is_measured_and_placed(weights, tmp_path):
    name = "layers.1.k.weight"
    other = {**weights, name: weights[name].clone(), "norm": weights["norm"].zero_().neg()}  # -0.0
    other[name][2, 3] += 0.5
    other[name][0, 0] -= 0.1
    result = compared(weights, other, tmp_path)
    (change,) = [change for change in result.changes if change.kind != "equal"]
    difference = (other[name].double() - weights[name].double()).norm() / weights[name].double().norm()
    assert (change.name, change.kind, result.is_faithful) == (name, "changed", False)
    assert change.relative == pytest.approx(float(difference))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.float64])
def test_a_conversion_is_faithful_in_both_directions(weights, dtype, tmp_path):
    other = {name: x.to(dtype) for name, x in weights.items()}
    assert compared(weights, other, tmp_path).is_faithful
    assert compared(other, weights, tmp_path).is_faithful


def test_bits_that_are_cut_off_in_place_of_rounded_are_a_change(weights, tmp_path):
    cut = {name: (x.view(torch.int32) & -65536).view(torch.float32).bfloat16() for name, x in weights.items()}
    kinds = {change.name: change.kind for change in compared(weights, cut, tmp_path).changes}
    assert kinds.pop("norm") == "converted"  # ones are exact
    assert set(kinds.values()) == {"changed"}


@pytest.mark.parametrize(("value", "dtype"), [(1e-9, torch.float16), (1e6, torch.float8_e5m2)])
def test_a_cast_that_does_more_than_round_is_a_change(value, dtype, tmp_path):
    x = torch.full((4, 4), value)
    (change,) = compared({"x": x}, {"x": x.to(dtype)}, tmp_path).changes
    assert (change.kind, change.relative) == ("changed", float("inf") if value == 1e6 else 1.0)


def test_renamed_missing_and_reshaped_tensors_are_named(weights, tmp_path):
    other = {f"module.{name}": x for name, x in weights.items() if name != "norm"}
    other["h.q"] = other.pop("module.layers.0.q.weight")
    other["module.layers.1.q.weight"] = torch.randn(14, 8)
    other["module.layers.1.k.weight"] = torch.tensor([[1.0, torch.nan], [torch.inf, 3.0]])
    weights["layers.1.k.weight"] = other["module.layers.1.k.weight"].bfloat16()
    other["extra"] = torch.ones(8)  # as the lost norm is, and many another
    result = compared(weights, other, tmp_path)
    kinds = {change.name: change.kind for change in result.changes}
    expected = {"norm": "missing there", "layers.1.q.weight": "not compared", "layers.0.q.weight": "equal"}
    assert [change.other for change in result.changes if change.kind == "only there"] == ["extra"]
    assert kinds.items() >= {*expected.items(), ("layers.1.k.weight", "converted")}  # a nan in both is equal
    text = f"{result.to_text()}\n"
    assert f"What became of it: {tmp_path}/b.safetensors.\nNot the same: " in text
    rows = ("equal  layers.0.q.weight -> h.q", "missing there  norm", "only there  extra")
    assert all(f" {row}\n" in text for row in rows)
    assert " layers.0.k.weight" not in text  # equal under its own name


def test_names_that_occur_twice_are_matched_in_order(tmp_path):
    """A key may have a dot, and the files of several ranks have the same names."""
    (tmp_path / "run").mkdir()
    torch.save({"a.b": torch.rand(3), "a": {"b": torch.rand(4)}}, tmp_path / "run" / "model.pt")
    for rank in range(2):
        torch.save({"cpu": torch.full((5,), rank)}, tmp_path / "run" / f"rng_state_{rank}.pth")
    changes = nanwatch.scan(tmp_path / "run", against=tmp_path / "run").changes
    assert [change.name for change in changes] == ["a.b", "a.b", "cpu", "cpu"]
    assert {change.kind for change in changes} == {"equal"}
