"""`nanwatch.scan` and `nanwatch scan`: what they find in planted checkpoints, and their forms."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import nanwatch
from nanwatch.__main__ import main
from nanwatch.checkpoint import scan as scan_module


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return {f"layers.{i}.w.weight": torch.randn(32, 16) for i in range(6)}


def found(result, kind):
    """Return the tensors of the findings of a kind."""
    return [one.tensors for one in result.findings if one.kind == kind]


def test_a_healthy_checkpoint_has_no_finding(layers, tmp_path):
    save_file(layers, tmp_path / "x.safetensors")
    result = nanwatch.scan(tmp_path / "x.safetensors")
    assert result.is_sound
    assert result.findings == ()


def test_planted_faults_are_named_with_their_place(layers, tmp_path):
    layers["layers.0.w.weight"][3, 5] = torch.nan
    layers["layers.1.w.weight"][2] = 0
    layers["layers.1.w.weight"][:, 7] = 0
    layers["layers.2.w.weight"] *= 100
    layers["layers.4.w.weight"] = layers["layers.3.w.weight"].clone()
    layers["layers.5.w.weight"].fill_(1e-41)
    layers["mask"] = torch.full((4, 4), -torch.inf).triu(1)
    layers["second.moment"] = torch.rand(4) * 1e-9
    layers["big"] = torch.tensor([1e5, 1e39], dtype=torch.float64)
    layers["bias"] = torch.zeros(9)
    save_file(layers, tmp_path / "x.safetensors")
    result = nanwatch.scan(tmp_path / "x.safetensors")
    by_name = {one.name: one for one in result.tensors}
    assert [one.tensors for one in result.findings if one.is_fault] == [("layers.0.w.weight",)]
    assert by_name["layers.0.w.weight"].health.first_nonfinite == (3, 5)
    assert by_name["layers.1.w.weight"].first_dead_rows == (2,)
    assert by_name["layers.1.w.weight"].first_dead_columns == (7,)
    assert found(result, "dead") == [("layers.1.w.weight",)] * 2
    assert found(result, "outlier") == [("layers.2.w.weight",)]
    assert found(result, "duplicate") == [("layers.3.w.weight", "layers.4.w.weight")]
    assert found(result, "subnormal") == [("layers.5.w.weight",)]
    assert found(result, "mask") == [("mask",)]
    assert found(result, "all zero") == [("bias",)]
    assert {"big", "second.moment", "layers.5.w.weight"} == {name for (name,) in found(result, "range")}
    assert len([one for one in result.findings if one.tensors == ("big",) and one.kind == "range"]) == 2


def test_one_tensor_under_two_names_is_tied_and_a_copy_is_a_duplicate(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    torch.save({"a": x, "b": x, "c": x.clone(), "d": x[4:], "e": torch.randn(8, 4)}, tmp_path / "x.pt")
    result = nanwatch.scan(tmp_path / "x.pt")
    assert found(result, "tied") == [("a", "b")]
    assert found(result, "duplicate") == [("a", "c")]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_tensor_of_many_tasks_and_chunks_is_read_once_and_whole(threads, tmp_path, monkeypatch):
    monkeypatch.setattr(scan_module, "_TASK", 1 << 19)
    torch.manual_seed(1)
    x = torch.randn(700, 1001)
    x[650, 1000], x[699, 0] = torch.inf, torch.nan
    x[300], x[:, 17] = 0, 0
    save_file({"x": x, "empty": torch.empty(0, 4), "scalar": torch.tensor(2.0)}, tmp_path / "x.safetensors")
    told = []
    result = nanwatch.scan(tmp_path / "x.safetensors", threads=threads, tell=lambda *step: told.append(step))
    by_name = {one.name: one for one in result.tensors}
    assert str(by_name["x"].health) == str(nanwatch.tensor_health(x))
    path = tmp_path / "x.safetensors"
    assert nanwatch.scan(path, against=path).tensors[-1].fingerprint == nanwatch.fingerprint(x)
    assert (by_name["x"].first_dead_rows, by_name["x"].first_dead_columns) == ((300,), (17,))
    assert by_name["empty"].health.numel == 0
    assert by_name["scalar"].health.abs_max == 2.0
    assert told[-1][1:3] == (2, 2)


def test_matrices_that_leave_a_format_are_those_of_would_fit(layers, tmp_path):
    name = "layers.0.w.weight"
    layers[name][:, 0] = 1e6
    save_file(layers, tmp_path / "x.safetensors")
    result = nanwatch.scan(tmp_path / "x.safetensors", to=["float16", "mxfp8", "mxfp4"])
    found = [one for one in result.findings if one.kind == "range" and "become zero" in one.text]
    plain, mxfp8, mxfp4 = (nanwatch.would_fit(layers[name], form) for form in ("float16", "mxfp8", "mxfp4"))
    assert [one.text for one in found] == [
        f"{plain.overflow:.3%} overflow and {plain.underflow:.3%} become zero in float16",
        f"0.000% become nan or inf and {mxfp8.flushed:.3%} become zero in mxfp8",
        f"0.000% become nan or inf and {mxfp4.flushed:.3%} become zero in mxfp4",
    ]
    assert {one.tensors for one in found} == {(name,)}
    with pytest.raises(ValueError, match="mxfp99"):
        nanwatch.scan(tmp_path / "x.safetensors", to=["mxfp99"])


def test_matrices_have_the_sqnr_that_would_fit_has_for_all_of_them(tmp_path):
    torch.manual_seed(0)
    weights = {"large": torch.randn(300, 1000).bfloat16(), "low": torch.randn(64, 128).exp().pow(3)}
    save_file({**weights, "bias": torch.randn(9)}, tmp_path / "x.safetensors")
    formats = ["nvfp4", "mxfp8", "float8_block128x128", "float16"]
    result = nanwatch.scan(tmp_path / "x.safetensors", to=formats)
    for one in result.tensors:
        fits = [nanwatch.would_fit(weights[one.name], form) for form in formats[:3] if one.name in weights]
        assert one.sqnr == (pytest.approx({fit.format: fit.sqnr for fit in fits}) if fits else None)
    found = [one for one in result.findings if one.kind == "sqnr"]
    both = [nanwatch.would_fit(x, "nvfp4") for x in weights.values()]
    total = 10 * math.log10(sum(fit.signal for fit in both) / sum(fit.noise for fit in both))
    lowest = min(both, key=lambda fit: fit.sqnr)
    assert found[0].text == f"{total:.1f} dB in nvfp4 over 2 matrices, {lowest.sqnr:.1f} dB in the lowest"
    assert found[0].tensors == (("large", "low") if lowest is both[0] else ("low", "large"))
    assert len(found) == 3
    saved = {one["name"]: one["sqnr"] for one in json.loads(result.to_json())["tensors"]}
    assert saved["low"].keys() == set(formats[:3])


def test_the_command_has_its_statuses_and_forms(layers, tmp_path, capsys):
    good, bad = str(tmp_path / "good.safetensors"), str(tmp_path / "bad.safetensors")
    save_file(layers, good)
    assert main(["scan", good]) == 0
    assert "sound" in capsys.readouterr().out
    layers["layers.0.w.weight"][0, 0] += 1
    save_file(layers, bad)
    assert main(["scan", good, "--against", bad]) == 1
    layers["layers.0.w.weight"][0, 0] = torch.nan
    save_file(layers, bad)
    capsys.readouterr()
    assert main(["scan", bad, "--against", good, "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["is_sound"], document["is_faithful"]) == (
        "nanwatch.scan",
        False,
        False,
    )
    page = tmp_path / "scan.html"
    assert main(["scan", bad, "--against", good, "--html", str(page)]) == 3
    assert "layers.0.w.weight" in page.read_text()
    assert main(["scan", str(tmp_path / "missing")]) == 2
    (tmp_path / "x.txt").write_text("text")
    assert main(["scan", str(tmp_path / "x.txt")]) == 2
    assert "no checkpoint that nanwatch reads" in capsys.readouterr().err


def test_what_cannot_be_read_stands_beside_what_can(tmp_path):
    entries = {"a": ("F4", [4, 4], 8), "b": ("new", [2], 0), "c": ("C64", [2, 2], 32), "d": ("BOOL", [2], 2)}
    entries |= {"e": ("F32", [0, 3], 0), "f": ("F32", [9], 36)}
    header, at = {}, 0
    for name, (dtype, shape, size) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\1" * (at - 4))  # the end is missing
    result = nanwatch.scan(path)
    assert [one.name for one in result.tensors if one.unread] == ["a", "b"]
    assert [one.name for one in result.tensors if one.lost] == ["f"]
    assert [one.name for one in result.tensors if one.health is not None] == ["c", "d", "e"]
    assert not nanwatch.scan(path, against=path).comparison.is_faithful


def test_names_from_strangers_are_made_visible(tmp_path):
    save_file({"a\x1b[31m": torch.tensor([torch.nan])}, tmp_path / "x.safetensors")
    assert "\x1b" not in nanwatch.scan(tmp_path / "x.safetensors").to_text()


@pytest.mark.slow
@pytest.mark.native
def test_twenty_gigabytes_take_less_than_300_mib(tmp_path):
    from subprocess import run
    from sys import executable

    header = json.dumps(
        {"x": {"dtype": "BF16", "shape": [10 << 20, 1000], "data_offsets": [0, 20_971_520_000]}}
    )
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + 20_971_520_000)
    code = f"""
import nanwatch
result = nanwatch.scan({str(path)!r})
assert result.tensors[0].health.num_zero == 10_485_760_000, result
assert result.tensors[0].dead_columns == 1000
print(next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    done = run([executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300


@pytest.mark.parametrize(
    ("paths", "options", "error", "words"),
    [
        ((None,), {}, TypeError, "the path NoneType"),
        ((["a.pt"],), {}, TypeError, "the path list"),
        (("",), {}, ValueError, "got no path"),
        (("w.npy",), {"to": torch.float16}, ValueError, "got the format torch.float16; accepted are float8"),
        (("w.npy",), {"to": "float16,fp9"}, ValueError, "got the format 'fp9'"),
        (
            ("w.npy",),
            {"against": "text.pt"},
            ValueError,
            "text.pt cannot be compared with: .* does not begin as",
        ),
    ],
)
def test_bad_use_is_told(paths, options, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("w.npy", np.ones(3))
    (tmp_path / "text.pt").write_text("text")
    with pytest.raises(error, match=words):
        nanwatch.scan(*paths, **options)


def test_formats_may_be_one_text_and_nothing_read_is_not_called_sound(tmp_path, capsys):
    np.save(tmp_path / "w.npy", np.ones((2, 32), np.float32))
    assert nanwatch.scan(tmp_path / "w.npy", to="float16,mxfp8").tensors[0].sqnr.keys() == {"mxfp8"}
    np.save(tmp_path / "s.npy", np.array(["a"]))
    assert main(["scan", str(tmp_path / "s.npy")]) == 2
    assert "nothing was checked, 1 tensors not checked" in capsys.readouterr().out
