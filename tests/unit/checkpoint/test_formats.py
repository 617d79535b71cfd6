"""Files of each format have the tensors that their libraries wrote. Damaged ones run nothing and never crash."""

import io
import json
import os
import pickle
import random
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import nanwatch
from nanwatch.checkpoint.formats import read_checkpoint
from nanwatch.checkpoint.inert_pickle import load
from nanwatch.checkpoint.stored import DamagedError
from support.gguf import gguf_bytes

torch.manual_seed(0)
TENSORS = {
    "layers.0.weight": torch.randn(6, 10),
    "layers.1.weight": torch.randn(6, 10).bfloat16(),
    "norm": torch.randn(7, dtype=torch.float64),
    "half": torch.randn(3, 3).half(),
    "ids": torch.arange(9),
}


def gguf_entries():
    """Return an F32 matrix, and one of Q8_0, Q4_0 and Q4_K."""
    values = TENSORS["layers.0.weight"].numpy().tobytes()
    q8 = b"".join(struct.pack("<e32b", 0.5 + i, *range(-16, 16)) for i in range(4))
    q4 = struct.pack("<e16B", 2.0, *(i | (15 - i) << 4 for i in range(16)))
    return [
        ("w", (10, 6), 0, values),
        ("q8", (64, 2), 8, q8),
        ("q4", (32, 1), 2, q4),
        ("k", (256, 1), 12, b"\0" * 144),
    ]


def write(kind, folder):
    """Write the tensors in a format and return the path, and the tensors that come back."""
    path, expected = folder / f"model.{kind}", TENSORS
    if kind == "safetensors":
        save_file(TENSORS, path)
    elif kind == "pt":
        torch.save({"model": TENSORS}, path)
        expected = {f"model.{name}": x for name, x in TENSORS.items()}
    elif kind == "bin":
        torch.save(TENSORS, path, _use_new_zipfile_serialization=False)
    elif kind in ("npz", "deflated.npz"):
        expected = {name: x for name, x in TENSORS.items() if x.dtype != torch.bfloat16}
        save = np.savez if kind == "npz" else np.savez_compressed
        save(path, **{name: x.numpy() for name, x in expected.items()})
    elif kind == "gguf":
        path.write_bytes(gguf_bytes(gguf_entries()))
        q8 = torch.arange(-16.0, 16).repeat(4, 1) * torch.tensor([[0.5], [1.5], [2.5], [3.5]])
        q4 = torch.cat([torch.arange(-8.0, 8), torch.arange(7.0, -9, -1)]) * 2
        expected = {
            "w": TENSORS["layers.0.weight"],
            "q8": q8.reshape(2, 64),
            "q4": q4[None],
            "k": torch.zeros(1, 256),
        }
    return path, expected


KINDS = ("safetensors", "pt", "bin", "npz", "deflated.npz", "gguf")


@pytest.mark.parametrize("kind", KINDS)
def test_each_format_has_the_tensors_that_were_written(kind, tmp_path):
    path, expected = write(kind, tmp_path)
    result = nanwatch.scan(path, threads=2, against=path)
    found = {one.name: one for one in result.tensors}
    assert result.is_sound
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].shape == tuple(x.shape)
        assert found[name].health == nanwatch.tensor_health(x)
        if not name.startswith(("q", "k")):
            assert found[name].fingerprint == nanwatch.fingerprint(x)


def test_copies_among_encoded_tensors_are_duplicates(tmp_path):
    def q8(seed):
        chance = random.Random(seed)
        return b"".join(struct.pack("<e", 0.5) + chance.randbytes(32) for _ in range(256))

    entries = [(name, (1024, 8), 8, q8(seed)) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(entries))
    duplicates = [one.tensors for one in nanwatch.scan(path).findings if one.kind == "duplicate"]
    assert duplicates == [("a", "b")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_file_names_what_is_lost_and_reads_the_rest(kind, tmp_path):
    path, expected = write(kind, tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 6 // 10])
    result = nanwatch.scan(path)
    assert not result.is_sound
    for one in result.tensors:
        assert one.lost or one.unread or one.health == nanwatch.tensor_health(expected[one.name])
    if kind in ("safetensors", "gguf"):
        assert any(one.lost for one in result.tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_give_an_answer_or_a_clear_error(kind, tmp_path):
    path, _ = write(kind, tmp_path)
    content = path.read_bytes()
    random.seed(1)
    head = len(content) if kind in ("pt", "bin", "npz") else min(len(content), 700)
    for _ in range(40):
        damaged = bytearray(content)
        for _ in range(random.choice((1, 1, 3, 20))):
            damaged[random.randrange(head)] = random.choice((0, 0xFF, random.randrange(256)))
        if random.random() < 0.3:
            damaged = damaged[: random.randrange(len(damaged))]
        path.write_bytes(damaged)
        try:
            result = nanwatch.scan(path, threads=1)
        except (ValueError, OSError):
            continue  # no checkpoint at all any more
        json.loads(result.to_json())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_mutations_are_read_or_refused(kind, tmp_path):
    path, _ = write(kind, tmp_path)
    content = path.read_bytes()
    random.seed(2)
    for _ in range(2000):
        damaged = bytearray(content)
        for _ in range(random.choice((1, 2, 8))):
            damaged[random.randrange(len(damaged))] = random.choice((0, 0xFF, random.randrange(256)))
        path.write_bytes(damaged[: random.choice((len(damaged), random.randrange(len(damaged))))])
        try:
            contents = read_checkpoint(path)
        except (ValueError, OSError):
            continue
        assert all(one.numel < 1 << 80 for one in contents.tensors if not one.lost)


class Evil:
    def __reduce__(self):
        return os.system, ("touch owned",)


def test_a_pickle_runs_nothing_and_its_calls_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": TENSORS["norm"], "y": Evil()}, "evil.pt")
    result = nanwatch.scan("evil.pt")
    assert not Path("owned").exists()
    assert [one.name for one in result.tensors] == ["x"]
    assert any("system" in one.text for one in result.findings if one.kind == "remark")


def test_a_pickle_of_nested_tuples_costs_no_more_than_its_bytes():
    # As a key of a dict its hash would take 2^200 steps.
    bomb = b"\x80\x02)q\x00" + b"".join(b"h\x00h\x00\x86q\x00" for _ in range(200)) + b"}h\x00K\x01s."
    assert load(io.BytesIO(bomb), set()).pairs


@pytest.mark.parametrize(
    "damaged", [b"", b"\x80\x02", b".", b"\x80\x02(K\x01h\x05.", b"\x80\x02\x82\x01.", b"garbage"]
)
def test_what_is_no_pickle_is_refused(damaged):
    with pytest.raises(DamagedError):
        load(io.BytesIO(damaged), set())


def test_the_pickle_reader_knows_each_object_of_python():
    value = {"a": [1, 2.5, None, True, b"x", ("t", {"n": -(10**30)})], "s": {3}, "c": Path("x")}
    for protocol in range(1, pickle.HIGHEST_PROTOCOL + 1):
        made = load(io.BytesIO(pickle.dumps(value, protocol)), set())
        assert made["a"][:5] == [1, 2.5, None, True, b"x"] or protocol < 3  # bytes were a call of a codec
        assert made["a"][5][1]["n"] == -(10**30)


def test_parameters_ties_and_transposes_of_torch_save(tmp_path):
    weight = torch.randn(4, 6)
    weight[1, 2] = torch.nan
    module = torch.nn.Linear(3, 3)
    torch.save(
        {
            "w": weight,
            "tied": weight,
            "t": weight.t(),
            "row": weight[2],
            "m": module.state_dict(),
            "strided": weight[:, :2],
            "p": module.weight,
        },
        tmp_path / "x.pt",
    )
    result = nanwatch.scan(tmp_path / "x.pt", against=tmp_path / "x.pt")
    found = {one.name: one for one in result.tensors}
    assert found["t"].health.first_nonfinite == (2, 1)
    assert found["w"].health.first_nonfinite == found["tied"].health.first_nonfinite == (1, 2)
    assert found["row"].fingerprint == nanwatch.fingerprint(weight[2])
    assert "strides" in found["strided"].unread
    assert found["p"].fingerprint == nanwatch.fingerprint(module.weight.detach())
    assert ("tied", "w") in {(one.kind, one.tensors[0]) for one in result.findings if one.tensors}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_each_value_of_fraction_in_a_file_of_torch_save_is_read_or_named(layout, tmp_path):
    """Also those in NumPy arrays, and those in nested tensors, of which a jagged one holds several tensors."""
    part = torch.tensor([1.0, torch.nan])
    array = np.arange(6.0).reshape(2, 3)
    array[1, 0] = np.nan
    held = {
        "array": array,
        "fortran": np.asfortranarray(array.astype(np.float32)),
        "number": np.float16(np.nan),
        "counts": np.arange(3),
        "names": np.array(["a"]),
        "big": array.astype(">f8"),
        "nested": torch.nested.nested_tensor([part, part], layout=layout),
    }
    torch.save(held, tmp_path / "x.pt")
    result = nanwatch.scan(tmp_path / "x.pt")
    found = {one.name: one for one in result.tensors}
    for name in ("array", "fortran", "number"):
        assert found[name].health.num_nan == 1
    assert found["array"].health.first_nonfinite == found["fortran"].health.first_nonfinite == (1, 0)
    assert not {"counts", "names"} & found.keys()
    assert "big-endian" in found["big"].unread
    if layout == torch.jagged:
        assert found["nested.0.values"].health.num_nan == 2
    else:
        assert "nested" in found["nested"].unread


def test_an_index_names_missing_files_and_tensors(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    names = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors", "d": "../x.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    result = nanwatch.scan(tmp_path)
    assert {one.name for one in result.tensors if one.lost} == {"b", "c", "d"}
    assert {one.text.rpartition(": ")[2] for one in result.findings if one.kind == "file"} == {
        "two.safetensors",
        "'../x.safetensors'",
    }


def test_a_header_that_lies_is_a_problem_and_takes_no_memory(tmp_path):
    entry = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}
    header = json.dumps(
        {"huge": entry, "bad": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}
    ).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    assert all(one.lost for one in nanwatch.scan(path).tensors)
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{")
    assert nanwatch.scan(path).findings[0].kind == "file"


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="no regular file"):
        nanwatch.scan(tmp_path / "x.safetensors")


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_dcp_with_parts_along_each_dimension(tmp_path):
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    whole = torch.randn(6, 8)
    whole[4, 5] = torch.inf
    chunks, storage, data = [], {}, b""
    for i, (rows, columns) in enumerate([((0, 4), (0, 8)), ((4, 2), (0, 5)), ((4, 2), (5, 3))]):
        part = whole[rows[0] : sum(rows), columns[0] : sum(columns)].clone()
        offsets = torch.Size((rows[0], columns[0]))
        chunks.append(ChunkStorageMetadata(offsets, part.shape))
        buffer = io.BytesIO()
        torch.save(part, buffer)
        storage[MetadataIndex("w", offsets, i)] = _StorageInfo("__0_0.distcp", len(data), buffer.tell())
        data += buffer.getvalue()
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), whole.shape, chunks)
    (tmp_path / "__0_0.distcp").write_bytes(data)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"w": entry}, None, storage)))
    (found,) = nanwatch.scan(tmp_path, against=tmp_path).tensors
    assert found.fingerprint == nanwatch.fingerprint(whole)
    assert found.health == nanwatch.tensor_health(whole)
    (tmp_path / "__0_0.distcp").unlink()
    result = nanwatch.scan(tmp_path)
    assert result.tensors[0].lost
    assert not result.is_sound


def test_scans_of_several_threads_do_not_disturb_one_another(tmp_path):
    path, _ = write("safetensors", tmp_path)
    results = []
    threads = [threading.Thread(target=lambda: results.append(nanwatch.scan(path))) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len({one.to_json() for one in results}) == 1
    assert len(results) == 4


def test_a_safetensors_header_of_640_bytes_is_no_pickle(tmp_path):
    path = tmp_path / "model"
    save_file({"x": torch.ones(2)}, path, metadata={"fill": "x" * 558})
    content = path.read_bytes()
    assert content[:2] == b"\x80\x02"
    assert [one.name for one in nanwatch.scan(path).tensors] == ["x"]


def test_a_flipped_bit_is_found_by_checksums_alone(tmp_path):
    """In an archive of torch.save and one of NumPy, where every number stays finite."""
    x = torch.ones(64)
    torch.save({"w": x}, tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", w=x.numpy())
    for path, name in ((tmp_path / "a.pt", "a/data/0"), (tmp_path / "a.npz", "w.npy")):
        assert nanwatch.scan(path, checksums=True).is_sound
        data = bytearray(path.read_bytes())
        data[data.index(x.numpy().tobytes()) + 40] ^= 1
        path.write_bytes(data)
        assert nanwatch.scan(path).is_sound
        (finding,) = [one for one in nanwatch.scan(path, checksums=True).findings if one.is_fault]
        assert finding.text == f"{path}: the CRC-32 of {name} is wrong"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": x}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert nanwatch.scan(tmp_path / "a.pt", checksums=True).is_sound


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.safetensors", b"", "it is empty"),
        ("a.pt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "run git lfs pull"),
        ("a.safetensors", b"<!doctype html><html></html>", "does not begin as a safetensors file does"),
        ("step/__0_0.distcp", b"PK", ".metadata is missing, which torch.distributed.checkpoint writes last"),
    ],
)
def test_the_problem_says_what_a_file_is_in_place_of_a_checkpoint(name, content, words, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    (finding,) = nanwatch.scan(path if path.parent == tmp_path else path.parent).findings
    assert finding.is_fault
    assert words in finding.text


def test_a_file_of_torch_save_is_read_under_another_ending(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    assert [one.name for one in nanwatch.scan(tmp_path / "a.safetensors").tensors] == ["w"]


def test_a_compressed_array_of_a_cut_archive_says_so(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", w=np.random.default_rng(0).normal(size=5000))
    data = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(data[:-200])
    (tensor,) = nanwatch.scan(tmp_path / "a.npz").tensors
    assert tensor.lost == "it is compressed, and the archive is cut off"
