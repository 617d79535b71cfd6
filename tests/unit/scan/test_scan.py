"""`nanwatch.scan` and `nanwatch scan`: what they meet in planted checkpoints, and their forms."""

import json
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import nanwatch
from nanwatch.__main__ import main
from nanwatch.scan import scan as scan_module


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return {f"layers.{i}.w.weight": torch.randn(32, 16) for i in range(6)}


def names(result, kind):
    return [name for problem in result.problems if problem.kind == kind for name in problem.tensors]


def test_planted_faults_are_named_with_their_place(layers, tmp_path):
    save_file(layers, tmp_path / "x.safetensors")
    assert nanwatch.scan(tmp_path / "x.safetensors").problems == ()
    layers["layers.0.w.weight"][3, 5] = torch.nan
    layers["layers.1.w.weight"][2] = 0
    layers["layers.2.w.weight"] *= 100
    layers["layers.5.w.weight"].fill_(1e-40)
    layers |= {"mask": torch.full((4, 4), -torch.inf).triu(1), "half": torch.full((3,), 1e-6).half()}
    layers["second.moment"] = torch.rand(4) * 1e-9
    layers["big"] = torch.tensor([1e5, 1e39, 0, -torch.inf], dtype=torch.float64)  # no mask
    layers["bias\x1b[31m"] = torch.zeros(3, 3)
    save_file(layers, tmp_path / "x.safetensors")
    result = nanwatch.scan(tmp_path / "x.safetensors")
    by_name = {tensor.name: tensor for tensor in result.tensors}
    faults = [name for problem in result.problems if problem.is_fault for name in problem.tensors]
    assert sorted(faults) == ["big", "layers.0.w.weight"]
    assert by_name["layers.0.w.weight"].health.first_nonfinite == (3, 5)
    assert by_name["layers.1.w.weight"].first_dead_rows == (2,)
    assert (names(result, "dead"), names(result, "outlier")) == (["layers.1.w.weight"], ["layers.2.w.weight"])
    assert (names(result, "mask"), names(result, "zeros")) == (["mask"], ["bias\x1b[31m"])
    assert "\x1b" not in result.to_text()
    assert sorted(names(result, "range")) == ["big"] * 2 + ["layers.5.w.weight"] * 2 + ["second.moment"]


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_tensor_of_many_parts_is_read_whole(share, tmp_path, monkeypatch):
    monkeypatch.setattr(scan_module, "PART", 1 << 13)
    torch.manual_seed(1)
    x = torch.randn(70, 401)
    x[torch.rand(70, 401) < share] = -0.0
    finite = x.abs() + 1
    x[30], x[60:] = 0, 0
    x[65, 400], x[69, 0] = torch.inf, torch.nan
    tensors = {"x": x, "finite": finite, "empty": torch.empty(0, 4), "scalar": torch.tensor(2.0)}
    save_file(tensors, path := tmp_path / "x.safetensors")
    result = nanwatch.scan(path, against=path, tell=(tell := mock.Mock()))
    by_name = {tensor.name: tensor for tensor in result.tensors}
    for name in ("x", "finite"):
        assert str(by_name[name].health) == str(nanwatch.tensor_health(tensors[name]))
    assert by_name["x"].fingerprint == nanwatch.fingerprint(x)
    dead = (x == 0).all(1).nonzero().flatten().tolist()
    assert (by_name["x"].dead_rows, by_name["x"].first_dead_rows) == (len(dead), tuple(dead[:5]))
    assert (by_name["empty"].health.numel, by_name["scalar"].health.abs_max) == (0, 2.0)
    assert tell.called


def test_the_command_has_its_statuses_and_forms(layers, tmp_path, capsys):
    good, bad = str(tmp_path / "good.safetensors"), str(tmp_path / "bad.safetensors")
    save_file(layers, good)
    assert (main(["scan", good]), "sound" in capsys.readouterr().out) == (0, True)
    layers["layers.0.w.weight"][0, 0] += 1
    save_file(layers, bad)
    assert main(["scan", good, "--against", bad]) == 1
    layers["layers.0.w.weight"][0, 0] = torch.nan
    save_file(layers, bad)
    capsys.readouterr()
    assert main(["scan", bad, "--against", good, "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert [document[key] for key in ("schema", "is_sound", "is_faithful")] == ["nanwatch.scan", False, False]
    assert main(["scan", str(tmp_path / "godd.safetensors")]) == 2
    assert "close names: good.safetensors" in capsys.readouterr().err
    (tmp_path / "x.txt").write_text("text")
    assert main(["scan", str(tmp_path / "x.txt")]) == 2
    assert "no checkpoint that nanwatch reads" in capsys.readouterr().err
    np.save(tmp_path / "s.npy", np.array(["a"]))
    assert main(["scan", str(tmp_path / "s.npy")]) == 2
    assert "nothing was checked\n1 tensors" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.native
def test_twenty_gigabytes_take_less_than_300_mib(tmp_path):
    entry = {"dtype": "BF16", "shape": [10 << 20, 1000], "data_offsets": [0, 20_971_520_000]}
    header = json.dumps({"x": entry})
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + 20_971_520_000)
    code = f"""
import nanwatch
result = nanwatch.scan({str(path)!r})
assert result.tensors[0].health.num_zero == 10_485_760_000, result
assert result.tensors[0].dead_rows == 10 << 20
print(next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300


def test_bad_use_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("w.npy", np.ones(3))
    (tmp_path / "text.pt").write_text("text")
    with pytest.raises(TypeError, match="NoneType"):
        nanwatch.scan(None)
    with pytest.raises(ValueError, match="got no path"):
        nanwatch.scan("")
    lost, missing = nanwatch.scan("w.npy", against="text.pt").changes
    assert ("does not begin as" in lost.text, missing.kind) == (True, "missing there")
