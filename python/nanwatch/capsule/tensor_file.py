"""The tensors of a capsule and the file they lie in: `tensors.safetensors`, described entry by entry in the JSON.

The file has each tensor contiguous. What safetensors has no name for lies there as its bytes; the entry has the dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..numerics.ranges import only_our_dispatch, unreadable
from ..util.imports import needed
from ..util.reading import fail, shorten
from .tree import DTYPES, Json, device, dtype, sizes

# Those that every safetensors of the last years reads and writes; the rest goes as bytes.
_NATIVE = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
# A view of every n-th row is put back with its gaps when that takes at most this many times its own memory: a third of
# a fused query, key and value does, one token of a long sequence does not.
_MAX_GAPS = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: `strides` (in elements) are None where it was contiguous, `device` is where it was."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    requires_grad: bool
    device: str

    @classmethod
    def of(cls, x: Tensor) -> Entry:
        """The entry of a tensor that can be kept."""
        with torch._C.DisableTorchFunction():
            strides = None if x.is_contiguous() else tuple(x.stride())
            name = str(x.dtype).removeprefix("torch.")
            return cls(name, tuple(x.shape), strides, x.requires_grad, str(x.device))

    @property
    def nbytes(self) -> int:
        """What it takes in the file."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def type_name(self) -> str:
        """`float16 [4, 512]`."""
        return f"{self.dtype} {list(self.shape)}"

    def to_json(self) -> Json:
        """As it stands in the capsule's JSON."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "strides": None if self.strides is None else list(self.strides),
            "requires_grad": self.requires_grad,
            "device": self.device,
        }


def read_entry(value: Json, where: str) -> Entry:
    """What `Entry.to_json` wrote; ValueError, naming the place, for anything else."""
    if not isinstance(value, dict) or set(value) != set(Entry.__slots__):
        raise fail(where, f"an object with {', '.join(Entry.__slots__)}", value)
    kind = dtype(value["dtype"], f"{where}.dtype")
    shape = sizes(value["shape"], f"{where}.shape")
    if type(value["requires_grad"]) is not bool:
        raise fail(f"{where}.requires_grad", "true or false", value["requires_grad"])
    if value["requires_grad"] and not (kind.is_floating_point or kind.is_complex):
        raise fail(f"{where}.requires_grad", f"false, as the dtype is {value['dtype']}", True)
    strides = None if value["strides"] is None else sizes(value["strides"], f"{where}.strides")
    if strides is not None and len(strides) != len(shape):
        raise fail(f"{where}.strides", f"{len(shape)} numbers, one a dimension", value["strides"])
    place = str(device(value["device"], f"{where}.device"))
    return Entry(value["dtype"], shape, strides, value["requires_grad"], place)


def why_not(x: Tensor) -> str:
    """Why the values of `x` cannot be kept, in a few words; "" when they can."""
    reason = unreadable(x)
    if reason and not reason.startswith("dtype "):
        return reason
    with torch._C.DisableTorchFunction():
        knows_alone = type(x).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
        if type(x) is not Tensor and knows_alone:
            return "a subclass whose values only its own code knows"
        if x.layout is not torch.strided or x.is_nested or x.is_quantized:
            return f"its values do not lie in one block of memory ({'nested' if x.is_nested else x.layout})"
    return ""


def save(path: Path, tensors: Mapping[str, Tensor], label: str) -> None:
    """Write the file; `label` goes into it and is what `load` expects. Waits for the tensors' devices."""
    kept: dict[str, Tensor] = {}
    storages: set[int] = set()
    with only_our_dispatch(), torch.no_grad():
        for name, x in tensors.items():
            plain = x.detach().resolve_conj().resolve_neg()
            plain = (plain.clone() if plain._is_zerotensor() else plain).contiguous().cpu()
            if str(x.dtype).removeprefix("torch.") not in _NATIVE:
                # The one element of [1, 1] may have any strides and is called contiguous; bytes ask for a stride of 1.
                plain = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
            # The library refuses two tensors in one piece of memory.
            storage = plain.untyped_storage().data_ptr()
            kept[name] = plain.clone() if storage in storages else plain
            storages.add(storage)
        _library().torch.save_file(kept, str(path), {"format": "pt", "capsule": label})


def load(path: Path, entries: Mapping[str, Entry], label: str) -> dict[str, Tensor]:
    """The tensors of the file, on the CPU, in memory of their own, strided as they were where nothing overlaps.

    Raises ValueError for a file that is damaged or has not exactly these entries, ImportError without safetensors.
    """
    safetensors = _library()
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            if (file.metadata() or {}).get("capsule") != label:
                raise ValueError("it belongs to another capsule: the names of both are not the same")
            for name in sorted(set(file.keys()) ^ set(entries)):
                raise ValueError(f"tensor {shorten(name)} is in one of the two files only")
            return {name: _load(file, name, entry) for name, entry in entries.items()}
    except ValueError:
        raise
    except BaseException as error:
        # A panic of the Rust library is no Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{type(error).__name__}: {shorten(str(error))}") from error
        raise


def _load(file: Any, name: str, entry: Entry) -> Tensor:
    kind = DTYPES[entry.dtype]
    is_native = entry.dtype in _NATIVE
    expected = _NATIVE.get(entry.dtype, "U8"), list(entry.shape) if is_native else [entry.nbytes]
    stored = file.get_slice(name)
    found = stored.get_dtype(), list(stored.get_shape())
    if found != expected:
        raise ValueError(
            f"tensor {shorten(name)} is {found[0]} {found[1]}; capsule.json says {expected[0]} {expected[1]}"
        )
    mapped: Tensor = file.get_tensor(name)
    if kind is torch.bool and mapped.numel() and int(mapped.view(torch.uint8).max()) > 1:
        raise ValueError(f"tensor {shorten(name)} is bool and has other bytes than 0 and 1")
    x = mapped.clone()
    if not is_native:
        x = x.view(kind).reshape(entry.shape)
    if entry.strides is not None:
        x = _strided(x, entry.strides)
    return x.requires_grad_(entry.requires_grad)


def _strided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`x` with these strides; as it is where they overlap or take far more memory."""
    span = 1
    for stride, size in sorted(zip(strides, x.shape, strict=True)):
        if size == 1:
            continue
        if stride < span:
            return x
        span = stride * (size - 1) + span
    if x.numel() == 0 or span > _MAX_GAPS * x.numel():
        return x
    memory = torch.zeros(span * x.element_size(), dtype=torch.uint8).view(x.dtype)
    return memory.as_strided(x.shape, strides).copy_(x)


def _library() -> Any:
    needed("safetensors.torch", "a capsule", "capsule")
    return needed("safetensors", "a capsule", "capsule")
