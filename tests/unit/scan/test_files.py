"""Files of each format have the tensors that their libraries wrote. Others run nothing and never crash."""

import json
import os
import pickle
import struct
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import nanwatch
from nanwatch.scan import scan as scan_module

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

torch.manual_seed(0)
TENSORS = {
    "layers.0.weight": torch.randn(6, 10),
    "layers.1.weight": torch.randn(6, 10).bfloat16(),
    "norm": torch.randn(7, dtype=torch.float64),
    "half": torch.randn(3, 3).half(),
    "ids": torch.arange(9),
}
KINDS = ("safetensors", "pt", "bin", "npz", "gguf", "dcp")


def write(kind, folder):
    """Write the tensors in a format and return the path, and the tensors that come back."""
    path, expected = folder / f"model.{kind}", TENSORS
    if kind == "safetensors":
        save_file(TENSORS, path)
    elif kind in ("pt", "bin"):
        torch.save(TENSORS, path, _use_new_zipfile_serialization=kind == "pt")
    elif kind == "npz":
        expected = {name: x for name, x in TENSORS.items() if x.dtype != torch.bfloat16}
        swapped = {name: np.array(x.numpy(), x.numpy().dtype.newbyteorder()) for name, x in expected.items()}
        np.savez_compressed(path, **swapped)
    elif kind == "dcp":
        dcp.save(dict(TENSORS), checkpoint_id=path)
    elif kind == "gguf":
        q8 = b"".join(struct.pack("<e32b", 0.5 + i, *range(-16, 16)) for i in range(4))
        writer, types = gguf.GGUFWriter(path, "llama"), gguf.GGMLQuantizationType
        writer.add_array("tokens", ["a", "bc"])
        writer.add_tensor("w", TENSORS["layers.0.weight"].numpy())
        writer.add_tensor("q8", np.frombuffer(q8, np.uint8).reshape(2, -1), raw_dtype=types.Q8_0)
        writer.add_tensor("b", TENSORS["layers.1.weight"].view(torch.uint8).numpy(), raw_dtype=types.BF16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        expected = {
            "w": TENSORS["layers.0.weight"],
            "q8": (torch.arange(-16.0, 16) * torch.tensor([[0.5], [1.5], [2.5], [3.5]])).reshape(2, 64),
            "b": TENSORS["layers.1.weight"],
        }
    return path, expected


@pytest.mark.parametrize("kind", KINDS)
def test_each_format_has_the_tensors_that_were_written(kind, tmp_path):
    path, expected = write(kind, tmp_path)
    result = nanwatch.scan(path, against=path)
    tensors = {tensor.name: tensor for tensor in result.tensors}
    assert (result.is_sound, result.is_faithful, tensors.keys()) == (True, True, expected.keys())
    for name, x in expected.items():
        assert (tensors[name].shape, tensors[name].health) == (tuple(x.shape), nanwatch.tensor_health(x))
        if name != "q8":
            assert tensors[name].fingerprint == nanwatch.fingerprint(x)
    if path.is_file():
        path.write_bytes((content := path.read_bytes())[: len(content) * 6 // 10])
        assert not nanwatch.scan(path).is_sound


def test_blocks_are_decoded_part_by_part(tmp_path, monkeypatch):
    monkeypatch.setattr(scan_module, "PART", 1 << 7)  # one block
    monkeypatch.setattr(gguf, "dequantize", decode := mock.Mock(side_effect=gguf.dequantize))
    path, expected = write("gguf", tmp_path)
    tensors = {tensor.name: tensor for tensor in nanwatch.scan(path).tensors}
    assert tensors["q8"].health == nanwatch.tensor_health(expected["q8"])
    assert decode.call_count == 5  # one asks whether gguf can


class Evil:
    def __reduce__(self):
        return os.system, ("touch owned",)


@pytest.mark.parametrize("is_archive", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(is_archive, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": TENSORS["norm"], "y": Evil()}, "evil.pt", _use_new_zipfile_serialization=is_archive)
    save_file({"x": TENSORS["norm"]}, "good.safetensors")
    result = nanwatch.scan("evil.pt", "good.safetensors")
    (problem,) = result.problems
    Path(".metadata").write_bytes(pickle.dumps(Evil()))  # of a folder of DCP
    assert not nanwatch.scan(tmp_path).is_sound
    assert not Path("owned").exists()
    assert (problem.kind, "posix.system" in problem.text) == ("not checked", True)
    assert result.is_sound  # the pickle of TrainingArguments beside a model is refused too
    assert not nanwatch.scan("evil.pt").is_checked


def test_parameters_views_and_arrays_of_torch_save(tmp_path):
    weight, module = torch.randn(4, 6), torch.nn.Linear(3, 3)
    weight[1, 2] = torch.nan
    tensors = {"w": weight, "t": weight.t(), "row": weight[2], "strided": weight[:, :2], "p": module.weight}
    arrays = {"array": np.array([np.nan]), "big": np.array([np.inf], ">f4"), "number": np.float16(np.nan)}
    content = {
        **tensors,
        **arrays,
        "m": module.state_dict(),
        "counts": np.arange(3),
        "best_loss": np.float64(np.inf),
        "sparse": weight.to_sparse(),
        "nested": torch.nested.nested_tensor([weight, weight[:2]], layout=torch.jagged),
    }
    torch.save(content, tmp_path / "x.pt")
    mapped = torch.load(tmp_path / "x.pt", mmap=True, weights_only=False)["w"].fill_(7)
    result = nanwatch.scan(tmp_path / "x.pt", against=tmp_path / "x.pt")
    assert (mapped == 7).all()  # the program's own mapping of the file keeps what was written to it
    read = {tensor.name: tensor for tensor in result.tensors}
    assert (read["w"].health.first_nonfinite, read["t"].health.first_nonfinite) == ((1, 2), (2, 1))
    for name, x in {**tensors, "m.weight": module.weight}.items():
        assert read[name].fingerprint == nanwatch.fingerprint(x.detach())
    assert not any(read[name].health.isfinite for name in (*arrays, "sparse", "nested"))
    assert '"nested"' in result.to_json()
    assert not {"counts", "best_loss"} & {*read}


def test_an_index_names_missing_files_and_tensors(tmp_path):
    for file in (tmp_path / "one.safetensors", tmp_path.parent / "x.safetensors"):
        save_file({"a" if file.parent == tmp_path else "d": torch.ones(2)}, file)
    names = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors", "d": "../x.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    torch.save({"state": torch.tensor([torch.nan])}, tmp_path / "optimizer.pt")  # which it does not name
    result = nanwatch.scan(tmp_path)
    assert [x.name for x in result.tensors if x.health and not x.health.isfinite] == ["state"]
    lost = {problem.tensors for problem in result.problems if problem.kind == "lost"}
    assert lost == {("b",), ("c",), ("d",)}
    changes = nanwatch.scan(tmp_path / "one.safetensors", against=tmp_path).changes
    assert [change.kind for change in changes if change.other in names] == ["not compared"] * 3 + ["equal"]
    files = [problem.text for problem in result.problems if problem.kind == "file"]
    assert ["'../x.safetensors'" in files[0], "'two.safetensors'" in files[1]] == [True, True]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_objects_programs_and_missing_shards_hide_no_tensor(tmp_path):
    np.savez(tmp_path / "a.npz", w=np.ones(3), names=np.array([None]))
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), tmp_path / "b.pt")
    save_file({"x": torch.ones(3)}, tmp_path / "m-00002-of-00002.safetensors")
    result = nanwatch.scan(tmp_path)
    words = zip(("'m-00001-of-00002", "TorchScript; save", "Object arrays"), result.problems, strict=True)
    assert [problem.is_fault for text, problem in words if text in problem.text] == [True, False, False]
    assert [x.name for x in result.tensors if x.health] == ["w", "x"]


def test_a_missing_part_or_file_of_dcp_is_lost(tmp_path):
    path, _ = write("dcp", tmp_path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["norm"].chunks.clear()  # as where a rank had no part in the save
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (problem,) = nanwatch.scan(path).problems
    assert (problem.tensors, problem.is_fault) == (("norm",), True)
    assert "0 of 7 elements" in problem.text
    (path / "__0_0.distcp").unlink()
    lost = [tensor.lost for tensor in nanwatch.scan(path).tensors if tensor.name != "norm"]
    assert all("__0_0.distcp" in text for text in lost)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.safetensors", b"", "it is empty"),
        ("a.pt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "run git lfs pull"),
        ("a.safetensors", b"<!doctype html><html></html>", "does not begin as a file of its kind"),
        ("step/__0_0.distcp", b"PK", ".metadata is missing"),
    ],
)
def test_the_problem_says_what_a_file_is_in_place_of_a_checkpoint(name, content, words, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    (problem,) = nanwatch.scan(path if path.parent == tmp_path else path.parent).problems
    assert (problem.is_fault, words in problem.text) == (True, True)


def test_the_content_tells_the_format_where_the_ending_does_not(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "a.model")
    assert [tensor.name for tensor in nanwatch.scan(tmp_path / "a.model").tensors] == ["w"]
    path = tmp_path / "model"
    save_file({"x": torch.tensor([True])}, path, metadata={"fill": "x" * 558})
    path.write_bytes((content := path.read_bytes())[:-1] + b"\x07")
    assert content[:2] == b"\x80\x02"  # as a pickle begins
    assert [(tensor.name, tensor.health.abs_max) for tensor in nanwatch.scan(path).tensors] == [("x", 7)]
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(ValueError, match="no regular file"):
        nanwatch.scan(tmp_path / "pipe.safetensors")
