"""The two files of a capsule: which tensors they keep, and what is refused with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanwatch.capsule.files import Entry, load, read_entry, save, why_not

pytest.importorskip("safetensors")

TENSORS = {
    "float32": torch.randn(3, 4),
    "strided": torch.randn(6, 4)[::2],
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "empty": torch.ones(0, 3),
    "scalar": torch.tensor(2.0, dtype=torch.float64),
    "leaf": torch.ones(2, requires_grad=True),
    "expanded": torch.ones(1, 3).expand(4, 3),
}


def test_tensors_come_back_with_their_bits_and_strides(tmp_path: Path) -> None:
    """Two of one memory have memory of their own; strides that overlap are those of a contiguous tensor."""
    tensors = {**TENSORS, "again": TENSORS["float32"]}
    entries = {name: Entry.of(x) for name, x in tensors.items()}
    save(tmp_path / "t", tensors, "call 1")
    back = load(tmp_path / "t", entries, "call 1")
    for name, x in tensors.items():
        # torch.equal does not know 8 bits.
        same = (back[name].view(torch.uint8), x.view(torch.uint8)) if name == "float8" else (back[name], x)
        assert torch.equal(*same), name
        assert (back[name].dtype, back[name].requires_grad) == (x.dtype, x.requires_grad)
    assert back["strided"].stride() == (8, 1)
    assert back["expanded"].stride() == (3, 1)
    assert back["again"].data_ptr() != back["float32"].data_ptr()


def test_a_file_that_does_not_match_is_refused(tmp_path: Path) -> None:
    """Of another capsule, with other tensors, of another dtype, or no file of tensors at all."""
    x = torch.ones(2, 3)
    save(tmp_path / "t", {"a": x}, "call 1")
    entry = Entry.of(x)
    for entries, label, words in (
        ({"a": entry}, "call 2", "belongs to another capsule"),
        ({"a": entry, "b": entry}, "call 1", "tensor 'b' is in one of the two files only"),
        ({"a": Entry.of(x.half())}, "call 1", r"tensor 'a' is F32 \[2, 3\]; capsule.json says F16"),
        ({"a": Entry.of(torch.ones(6))}, "call 1", r"capsule.json says F32 \[6\]"),
    ):
        with pytest.raises(ValueError, match=words):
            load(tmp_path / "t", entries, label)
    (tmp_path / "t").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="Error"):
        load(tmp_path / "t", {"a": entry}, "call 1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float5"}, "entry.dtype"),
        ({"shape": [2, -1]}, "entry.shape"),
        ({"strides": [1]}, "entry.strides should be 2 numbers, one a dimension"),
        (
            {"requires_grad": True, "dtype": "int64"},
            "entry.requires_grad should be false, as the dtype is int64",
        ),
        ({"device": "toaster"}, "entry.device"),
    ],
)
def test_an_entry_is_checked_with_its_place(changes: dict[str, Any], words: str) -> None:
    plain = {"dtype": "float32", "shape": [2, 3], "strides": None, "requires_grad": False, "device": "cpu"}
    entry = read_entry(plain, "entry")
    assert (entry.nbytes, entry.type_name) == (24, "float32 [2, 3]")
    with pytest.raises(ValueError, match=words):
        read_entry({**plain, **changes}, "entry")


class Foreign(Tensor):
    """Its values are known to its own code alone."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(2), ""),
        (torch.ones(2, device="meta"), "meta tensor, no data"),
        (torch.eye(2).to_sparse(), "its values do not lie in one block of memory (torch.sparse_coo)"),
        (torch.ones(2).as_subclass(Foreign), "a subclass whose values only its own code knows"),
    ],
    ids=["plain", "meta", "sparse", "subclass"],
)
def test_what_cannot_be_kept_says_why(x: Tensor, words: str) -> None:
    assert why_not(x) == words
