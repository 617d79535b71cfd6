"""Two checkpoints side by side: planted changes and conversions, measured against float64."""

import pytest
import torch
from safetensors.torch import save_file

import nanwatch


@pytest.fixture
def weights():
    torch.manual_seed(0)
    names = [
        f"model.layers.{i}.{part}"
        for i in range(2)
        for part in ("q.weight", "k.weight", "v.weight", "o.weight")
    ]
    tensors = {name: torch.randn(12 if "q." in name else 4, 8) for name in names}
    return tensors | {"model.layers.0.q.bias": torch.randn(12), "model.norm": torch.ones(8)}


def compared(a, b, folder):
    """Return the comparison of two dicts of tensors."""
    save_file(a, folder / "a.safetensors")
    save_file(b, folder / "b.safetensors")
    return nanwatch.scan(folder / "a.safetensors", against=folder / "b.safetensors").comparison


def test_the_same_numbers_are_equal_by_fingerprint(weights, tmp_path):
    found = compared(weights, weights, tmp_path)
    assert found.is_faithful
    assert {one.kind for one in found.changes} == {"equal"}


def test_a_change_is_measured_and_placed(weights, tmp_path):
    name = "model.layers.1.k.weight"
    other = {**weights, name: weights[name].clone()}
    other[name][2, 3] += 0.5
    other[name][0, 0] -= 0.1
    found = compared(weights, other, tmp_path)
    (change,) = [one for one in found.changes if one.kind != "equal"]
    apart = (other[name].double() - weights[name].double()).norm() / weights[name].double().norm()
    assert (change.names, change.kind, change.at) == ((name,), "changed", 2 * 8 + 3)
    assert change.relative == pytest.approx(float(apart))
    assert change.largest == pytest.approx(0.5)
    assert not found.is_faithful


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_conversion_is_faithful_when_each_element_is_the_nearest(weights, dtype, tmp_path):
    other = {name: x.to(dtype) for name, x in weights.items()}
    assert compared(weights, other, tmp_path).is_faithful
    if dtype is torch.bfloat16:  # cut off in place of rounded
        cut = {
            name: (x.view(torch.int32) & -65536).view(torch.float32).to(dtype) for name, x in weights.items()
        }
        found = compared(weights, cut, tmp_path)
        assert not found.is_faithful
        assert {one.kind for one in found.changes} == {"changed", "converted"}  # the ones are exact


def test_other_names_transposes_and_fused_projections_are_matched_by_value(weights, tmp_path):
    other = {"norm": weights["model.norm"].clone(), "b0": weights["model.layers.0.q.bias"].bfloat16()}
    for i in range(2):
        parts = [weights[f"model.layers.{i}.{part}.weight"] for part in "qkv"]
        other[f"h.{i}.qkv"] = torch.cat(parts).bfloat16()
        other[f"h.{i}.out"] = weights[f"model.layers.{i}.o.weight"].t().contiguous().bfloat16()
    for a, b, fused in ((weights, other, True), (other, weights, False)):
        found = compared(a, b, tmp_path)
        sides = {(one.names, one.others) if fused else (one.others, one.names): one for one in found.changes}
        for i in range(2):
            layer = f"model.layers.{i}"
            qkv = sides[tuple(f"{layer}.{part}.weight" for part in "qkv"), (f"h.{i}.qkv",)]
            out = sides[(f"{layer}.o.weight",), (f"h.{i}.out",)]
            assert "fused" in qkv.text
            assert "transposed" in out.text
            if fused:
                assert qkv.kind == out.kind == "converted"
                exact = torch.cat([weights[f"{layer}.{part}.weight"] for part in "qkv"]).double()
                apart = (other[f"h.{i}.qkv"].double() - exact).norm() / exact.norm()
                assert qkv.relative == pytest.approx(float(apart), rel=1e-5)
        assert (("model.layers.0.q.bias",), ("b0",)) in sides
        # A norm of ones looks like any other one: only its name could tell.
        assert (found.only, found.only_other) == (("model.norm",), ("norm",)) or not fused


def test_a_transposed_matrix_of_many_bands_is_compared_whole(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(700, 900)
    other = x.t().contiguous()
    other[5, 699] += 2
    (change,) = compared({"w": x}, {"w": other}, tmp_path).changes
    assert change.at == 699 * 900 + 5
    assert change.largest == pytest.approx(2, rel=1e-5)


def test_other_shapes_and_missing_tensors_are_told(weights, tmp_path):
    other = {name: x for name, x in weights.items() if name != "model.norm"}
    other["model.layers.0.q.weight"] = torch.randn(14, 8)
    other["extra"] = torch.randn(3)
    found = compared(weights, other, tmp_path)
    assert (found.only, found.only_other) == (("model.norm",), ("extra",))
    assert [one.names for one in found.changes if one.kind == "not compared"] == [
        ("model.layers.0.q.weight",)
    ]


def test_nan_in_both_is_no_difference(tmp_path):
    x = torch.tensor([[1.0, torch.nan], [torch.inf, 3.0]])
    found = compared({"x": x}, {"x": x.bfloat16()}, tmp_path)
    assert found.changes[0].kind == "converted"


def test_quantized_blocks_are_told_from_changes(tmp_path):
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    x = torch.randn(8, 64)
    save_file({"hf.w": x}, tmp_path / "a.safetensors")
    for kind in ("Q8_0", "Q4_0"):
        form = gguf.GGMLQuantizationType[kind]
        writer = gguf.GGUFWriter(tmp_path / "b.gguf", "llama")
        writer.add_tensor("blk.w", gguf.quantize(x.numpy(), form), raw_dtype=form)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found = nanwatch.scan(tmp_path / "a.safetensors", against=tmp_path / "b.gguf").comparison
        (change,) = found.changes
        read = torch.from_numpy(gguf.dequantize(gguf.quantize(x.numpy(), form), form))
        assert change.kind == "quantized"
        assert change.relative == pytest.approx(float((read - x).norm() / x.norm()), rel=1e-5)


def quantized(x, kind, place):
    gguf = pytest.importorskip("gguf")
    form = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(place, "llama")
    writer.add_tensor("w", gguf.quantize(x.numpy(), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_each_block_has_to_be_within_its_encodings_error(kind, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(64, 256) * torch.logspace(-9, 4, 64)[:, None]
    x[5, :32] = torch.tensor([1.0, -1.0] * 16)  # of 4 bits, half of these are off by a whole step
    x[6, :32] = torch.eye(32)[0]
    save_file({"w": x}, tmp_path / "a.safetensors")

    def kind_of(other):
        quantized(other, kind, tmp_path / "b.gguf")
        (change,) = nanwatch.scan(tmp_path / "a.safetensors", against=tmp_path / "b.gguf").comparison.changes
        return change.kind

    assert kind_of(x) == "quantized"
    for row, factor in ((40, 0.0), (40, -1.0), (50, 1.9)):
        other = x.clone()
        other[row] *= factor
        assert kind_of(other) == "changed"
    if kind == "Q8_0":
        other = x.clone()
        other[40, 3] += 0.1 * x[40].abs().max()
        assert kind_of(other) == "changed"


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1e6, torch.float16), (1e-9, torch.float16), (1e6, torch.float8_e4m3fn), (1e6, torch.float8_e5m2)],
)
def test_a_cast_that_does_more_than_round_is_a_change(value, dtype, tmp_path):
    x = torch.full((4, 4), value)
    (change,) = compared({"x": x}, {"x": x.to(dtype)}, tmp_path).changes
    assert change.kind == "changed"
    is_lost = not x.to(dtype).float().isfinite().all()
    assert ("16 finite elements become nan or inf" in change.text) == is_lost


def test_a_conversion_is_faithful_in_both_directions(weights, tmp_path):
    narrow = {name: x.to(torch.float8_e5m2) for name, x in weights.items()}
    assert compared(weights, narrow, tmp_path).is_faithful
    assert compared(narrow, weights, tmp_path).is_faithful


def test_the_text_lists_equal_tensors_under_other_names_and_no_numbers_of_what_was_not_compared(tmp_path):
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, 8)
    save_file({"x.q": q, "x.k": k, "y": torch.ones(4)}, tmp_path / "a.safetensors")
    save_file({"module.x.q": q, "z.k": k, "y": torch.ones(5)}, tmp_path / "b.safetensors")
    text = nanwatch.scan(tmp_path / "a.safetensors", against=tmp_path / "b.safetensors").to_text()
    assert "equal under other names: x.k -> z.k\n" in f"{text}\n"
    (line,) = [line for line in text.splitlines() if line.split()[2:4] == ["not", "compared"]]
    assert line.split()[:2] == ["-", "-"]
