"""A capsule from a stranger: opening it runs no code, reads no other file, and fails by CapsuleError alone."""

from __future__ import annotations

import builtins
import copy
import io
import json
import os
import pickle
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanwatch import Capsule, CapsuleError, write_capsule
from support.capsules import Batch, Pair
from support.toys import mlp

pytest.importorskip("safetensors")

JSON, TENSORS = "capsule.json", "tensors.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capsule with something of everything."""
    x = torch.randn(2, 3)
    held = Pair(x.t(), [1, float("nan"), None]), Batch({"a": (True, "b")}), {1, 2}
    kwargs = {"mask": torch.tensor([True, False]), "f8": torch.zeros(3, dtype=torch.float8_e8m0fnu)}
    return write_capsule(tmp_path_factory.mktemp("good") / "c", mlp(), "a.b", (x, *held), kwargs)


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (JSON, TENSORS)}


def write(folder: Path, contents: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, raw in contents.items():
        (folder / name).write_bytes(raw)
    return folder


def changed(good: Path, place: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the good capsule with its document changed."""
    document = json.loads((good / JSON).read_text())
    change(document)
    return write(place, files(good) | {JSON: json.dumps(document).encode()})


def error_of(folder: Path) -> str:
    with pytest.raises(CapsuleError) as caught:
        Capsule.open(folder)
    return str(caught.value)


kinds = st.sampled_from(["set", "cut", "drop", "double", "insert"])
mutations = st.lists(
    st.tuples(kinds, st.integers(0), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4
)


def mutate(raw: bytes, changes: list[tuple[str, int, bytes]], within: int | None = None) -> bytes:
    for kind, where, new in changes:
        at = where % (min(len(raw), within or len(raw)) + 1)
        raw = {
            "set": raw[:at] + new + raw[at + len(new) :],
            "cut": raw[:at],
            "drop": raw[:at] + raw[at + len(new) :],
            "double": raw[:at] + raw[at - len(new) : at] + raw[at:],
            "insert": raw[:at] + new + raw[at:],
        }[kind]
    return raw


def opens_or_says_why(contents: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        message = folder
        try:
            Capsule.open(write(Path(folder), contents))
        except CapsuleError as error:
            message = str(error)
        assert folder in message


@settings(max_examples=300)
@given(mutations)
def test_any_change_of_the_documents_bytes_opens_or_is_a_capsule_error(good, changes):
    """No other exception leaves `open`, and no hang."""
    contents = files(good)
    opens_or_says_why(contents | {JSON: mutate(contents[JSON], changes)})


@settings(max_examples=300)
@given(mutations, st.booleans())
def test_any_change_of_the_tensors_bytes_opens_or_is_a_capsule_error(good, changes, in_header):
    """The same for the other file, its header above all."""
    contents = files(good)
    header = 8 + struct.unpack("<Q", contents[TENSORS][:8])[0]
    opens_or_says_why(contents | {TENSORS: mutate(contents[TENSORS], changes, header if in_header else None)})


plain_json = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
words = st.sampled_from(["tensor", "dict", "slice", "structure", "size", "", "kind"])
json_values = st.recursive(
    plain_json | st.sampled_from(["input[0]", "nan", "cpu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=300)
@given(st.data())
def test_any_change_of_the_documents_values_opens_or_is_a_capsule_error(good, data):
    """Valid JSON in which any part has another value, of the right type or of a wrong one."""
    document = json.loads((good / JSON).read_text())
    place: Any = document
    while True:
        spots = list(place) if isinstance(place, dict) else list(range(len(place)))
        spot = data.draw(st.sampled_from(spots))
        inner = place[spot]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        place = inner
    place[spot] = data.draw(json_values)
    opens_or_says_why(files(good) | {JSON: json.dumps(document).encode()})


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Sets the value, the last of `path`, at the place that the others name."""

    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for part in path[:-2]:
            place = place[part]
        place[path[-2]] = path[-1]

    return change


def without_random_state(document: dict[str, Any]) -> None:
    """Names a value that was left out as the random state."""
    document["left_out"]["gone"] = {"what": "", "type": "", "bytes": 1, "why": ""}
    document["rng"]["cpu"] = "gone"


WEIGHT = "state[0.weight]"  # float32, 4 by 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (put("schema", "other"), "capsule.schema should be"),
        (put("version", 2), "its version is 2, this nanwatch reads version 1"),
        (put("extra", 1), "capsule has 'extra'"),
        (lambda document: document.pop("rng"), "capsule has no 'rng'"),
        (put("rank", "0"), "capsule.rank should be an integer"),
        (put("module", "device", "/etc/passwd"), "capsule.module.device should be the name of a device"),
        (put("label", "x"), "it belongs to another capsule"),
        (put("args", [{"tensor": "../../secret"}]), "capsule.args[0].tensor names '../../secret', which the"),
        (put("args", [{"tensor": "/etc/passwd"}]), "names '/etc/passwd', which the capsule does not have"),
        (put("args", [{"call": "os.system"}]), "capsule.args[0] has 'call', which is none of"),
        (put("args", [[1]]), "capsule.args[0] should be a plain value or an object with one key, got list of 1"),
        (put("args", [{"dict": [[{"list": []}, 1]]}]), "capsule.args[0].dict[0][0] should be a key"),
        (put("args", [{"dict": [[1, 1], [1, 2]]}]), "capsule.args[0].dict has one key twice"),
        (put("args", [{"slice": [1]}]), "capsule.args[0].slice should be a list of start, stop and step"),
        (put("args", [{"tuple": 1}]), "capsule.args[0].tuple should be a list, got 1"),
        (put("args", [{"dict": {"a": 1}}]), "capsule.args[0].dict should be a list of pairs"),
        (put("args", [{"dict": [[1]]}]), "capsule.args[0].dict[0] should be a pair"),
        (put("args", [{"tensor": 1}]), "capsule.args[0].tensor should be a name, got 1"),
        (put("args", [{"ellipsis": 1}]), "capsule.args[0].ellipsis should be true, got 1"),
        (put("args", [{"float": []}]), 'capsule.args[0].float should be "nan"'),
        (put("args", [{"device": "gpu:0"}]), "capsule.args[0].device should be the name of a device"),
        (
            put("kwargs", "x", {"structure": {"kind": "dataclass", "module": "", "class": "A", "fields": [[1, 1]]}}),
            "capsule.kwargs['x'].structure.fields should be pairs of a name and a value",
        ),
        (put("args", [{"size": [10**30]}]), "capsule.args[0].size should be"),
        (put("args", [{"size": [1.5]}]), "capsule.args[0].size should be"),
        (put("args", [{"dtype": "load"}]), "capsule.args[0].dtype should be the name of a torch.dtype"),
        (put("args", [{"float": "1"}]), 'capsule.args[0].float should be "nan"'),
        (put("kwargs", "x", {"structure": {"kind": "class"}}), "kwargs['x'].structure has no 'module'"),
        (put("state", "0.weight", "nothing"), "capsule.state['0.weight'].tensor names 'nothing'"),
        (put("training", {}), 'capsule.training has no ""'),
        (put("training", "", 1), "capsule.training[''] should be true or false"),
        (put("rng", {"cpu": WEIGHT}), "capsule.rng['cpu'] should be a tensor of bytes"),
        (put("rng", {"cpu": "input[mask]"}), "capsule.rng['cpu'] should be a tensor of bytes"),
        (without_random_state, "capsule.rng['cpu'] should be a tensor of bytes"),
        (put("rng", {"cuda:0": "rng[cpu]"}), "capsule.rng should have cpu"),
        (put("autocast", 0, "dtype", "half"), "capsule.autocast[0].dtype should be"),
        (put("finding", {"module": 1}), "capsule.finding has no 'class_name'"),
        (put("tensors", WEIGHT, "dtype", "float16"), f"'{WEIGHT}' is F32 [4, 3]; capsule.json says F16 [4, 3]"),
        (put("tensors", WEIGHT, "dtype", "complex64"), f"'{WEIGHT}' is F32 [4, 3]; capsule.json says U8 [96]"),
        (put("tensors", WEIGHT, "shape", [3, 4]), f"'{WEIGHT}' is F32 [4, 3]; capsule.json says F32 [3, 4]"),
        (put("tensors", WEIGHT, "shape", [-4, 3]), "shape should be a list of whole numbers from 0"),
        (put("tensors", WEIGHT, "shape", [2**62, 2**62]), f"'{WEIGHT}' is F32 [4, 3]; capsule.json says"),
        (put("tensors", WEIGHT, "strides", [1]), "strides should be 2 numbers, one a dimension"),
        (put("tensors", "input[mask]", "requires_grad", True), "requires_grad should be false, as the dtype is bool"),
        (put("tensors", WEIGHT, "requires_grad", 1), "requires_grad should be true or false"),
        (put("tensors", "input[f8]", "shape", [4]), "'input[f8]' is U8 [3]; capsule.json says U8 [4]"),
        (lambda document: document["tensors"].pop("input[f8]"), "tensor 'input[f8]' is in one of the two files only"),
        (put("tensors", "more", {"dtype": "int8"}), "capsule.tensors['more'] has no 'shape'"),
        (put("left_out", WEIGHT, {"what": "", "type": "", "bytes": 1, "why": ""}), "is among both capsule.tensors and"),
    ],
)  # fmt: skip
def test_the_error_names_file_place_and_what_was_expected(good, tmp_path, change, expected):
    """Each kind of wrong value, in a document that is else good."""
    message = error_of(changed(good, tmp_path / "c", change))
    assert expected in message
    assert str(tmp_path / "c") in message


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "Expecting value"),
        (b"[]", "capsule should be an object"),
        (b"\xff\xfe", "codec can't decode"),
        (b"NaN", "NaN is no JSON number"),
        (b'{"a": 1, "a": 2}', "one key twice"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"1" * 10_000, "integer"),
    ],
    ids=lambda x: repr(x[:8]),
)
def test_a_document_that_is_none(good, tmp_path, raw, expected):
    """Text that is no JSON, or JSON made to harm."""
    message = error_of(write(tmp_path / "c", files(good) | {JSON: raw}))
    assert expected in message
    assert JSON in message


@pytest.mark.parametrize("depth", [70, 400, 5000])
def test_arguments_nested_beyond_measure(good, tmp_path, depth):
    """Deep enough for the parser, too deep for a call."""
    raw = (good / JSON).read_text()
    document = json.loads(raw)
    document["args"] = "HERE"
    text = json.dumps(document).replace('"HERE"', '[{"list": [' * depth + "]}]" * depth)
    assert "nested" in error_of(write(tmp_path / "c", files(good) | {JSON: text.encode()}))


def test_a_document_beyond_all_size_is_not_read(good, tmp_path):
    """A sparse file of a terabyte is refused by its size."""
    folder = write(tmp_path / "c", files(good))
    os.truncate(folder / JSON, 1 << 40)
    assert "bytes, which is the most that is read" in error_of(folder)


@pytest.mark.parametrize("name", [JSON, TENSORS])
def test_missing_linked_and_special_files(good, tmp_path, name):
    """A file that is missing, a link to elsewhere, a folder or a pipe that nobody writes to: an error at once."""
    folder = write(tmp_path / "c", files(good))
    (folder / name).unlink()
    message = error_of(folder)
    assert str(folder / name) in message
    assert "No such file" in message
    (folder / name).symlink_to(good / name)
    assert "links are not followed" in error_of(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert "no regular file" in error_of(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    assert "no regular file" in error_of(folder)


def test_tensors_of_another_capsule_of_the_same_call_are_noticed(good, tmp_path):
    """The same names, shapes and dtypes, other values: the two files know each other."""
    model = mlp()
    one = write_capsule(tmp_path / "one", model, "", (torch.ones(1, 3),))
    two = write_capsule(tmp_path / "two", model, "", (torch.zeros(1, 3),))
    shutil.copy(two / TENSORS, one / TENSORS)
    assert "it belongs to another capsule" in error_of(one)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_tensors(good, tmp_path, keep):
    """Cut anywhere it is no capsule; the file is named."""
    contents = files(good)
    message = error_of(write(tmp_path / "c", contents | {TENSORS: contents[TENSORS][:keep]}))
    assert TENSORS in message


def test_bytes_that_are_no_bool(good, tmp_path):
    """A bool with the byte 7 is true to some kernels and seven to others: it is refused."""
    contents = files(good)
    size = struct.unpack("<Q", contents[TENSORS][:8])[0]
    start = json.loads(contents[TENSORS][8 : 8 + size])["input[mask]"]["data_offsets"][0] + 8 + size
    raw = contents[TENSORS][:start] + b"\x07" + contents[TENSORS][start + 1 :]
    assert "has other bytes than 0 and 1" in error_of(write(tmp_path / "c", contents | {TENSORS: raw}))


def test_strides_cannot_take_memory(good, tmp_path):
    """Gaps of terabytes are not made: the tensor stays contiguous."""
    folder = changed(good, tmp_path / "c", put("tensors", WEIGHT, "strides", [2**60, 2**50]))
    assert Capsule.open(folder).state["0.weight"].stride() == (3, 1)


def test_no_pickle_is_used_and_no_other_file_opened(monkeypatch, tmp_path):
    """Written and opened with every way into pickle barred; of files, only the capsule's two are opened."""

    def barred(*_: object, **__: object) -> None:
        raise AssertionError("pickle was used")

    for owner, names in (
        (pickle, ("load", "loads", "dump", "dumps", "Unpickler", "Pickler")),
        (torch, ("load", "save")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, barred)
    folder = write_capsule(tmp_path / "c", mlp(), "", (torch.randn(2, 3), Pair(1, Batch(2))))
    opened: list[str] = []
    real = io.open

    def watched(file: Any, *rest: Any, **more: Any) -> Any:
        opened.append(str(file))
        return real(file, *rest, **more)

    monkeypatch.setattr(io, "open", watched)
    monkeypatch.setattr(builtins, "open", watched)
    before = set(sys.modules)
    capsule = Capsule.open(folder)
    assert set(sys.modules) == before
    assert opened == [str(folder / JSON)]
    assert copy.copy(capsule.state).keys() == dict(mlp().named_parameters()).keys()


def test_capsule_error_is_a_value_error(tmp_path):
    """A CapsuleError is caught as a ValueError, and names the folder."""
    with pytest.raises(
        ValueError, match=r"nowhere/capsule\.json: No such file or directory; a capsule is a folder"
    ):
        Capsule.open(tmp_path / "nowhere")
