"""The two files of a capsule: `tensors.safetensors`, and `capsule.json`, which describes them entry by entry.

The first has each tensor contiguous. What safetensors has no name for lies there as its bytes; the entry has the dtype.
The second is read and checked before and without the tensors. Every reader takes a value and the place of it, so that
an error names the place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..instrumentation.execution_context import Autocast, RngState
from ..instrumentation.saving import unguarded
from ..numerics.readable import only_our_dispatch, unreadable
from ..report.finding import Finding
from ..util import reading
from ..util.imports import needed
from ..util.reading import fail, shorten
from ..util.visible import visible
from .tree import DTYPES, Json, LeftOut, device, dtype, sizes
from .tree import read as read_tree

# Dtypes that every safetensors of the last years reads and writes. Others go as bytes.
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
        """Return the entry of a tensor that can be kept."""
        with torch._C.DisableTorchFunction():
            strides = None if x.is_contiguous() else tuple(x.stride())
            name = str(x.dtype).removeprefix("torch.")
            return cls(name, tuple(x.shape), strides, x.requires_grad, str(x.device))

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in the file, in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def type_name(self) -> str:
        """Return `float16 [4, 512]`."""
        return f"{self.dtype} {list(self.shape)}"


def _name(read: reading.Reader[Any]) -> reading.Reader[str]:
    """Return a reader of a name that `read` accepts."""

    def read_name(value: Json, where: str) -> str:
        read(value, where)
        return str(value)

    return read_name


_ENTRY = reading.of(
    Entry, dtype=_name(dtype), shape=sizes, strides=reading.optional(sizes), device=_name(device)
)


def read_entry(value: Json, where: str) -> Entry:
    """Read an Entry from JSON. Raise ValueError, naming the place, for anything else."""
    entry = _ENTRY(value, where)
    kind = DTYPES[entry.dtype]
    if entry.requires_grad and not (kind.is_floating_point or kind.is_complex):
        raise fail(f"{where}.requires_grad", f"false, as the dtype is {entry.dtype}", True)
    if entry.strides is not None and len(entry.strides) != len(entry.shape):
        raise fail(f"{where}.strides", f"{len(entry.shape)} numbers, one a dimension", value["strides"])
    return entry


def why_not(x: Tensor) -> str:
    """Return why the values of `x` cannot be kept, in a few words; "" when they can."""
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
        with unguarded():
            _library().torch.save_file(kept, str(path), {"format": "pt", "capsule": label})


def load(path: Path, entries: Mapping[str, Entry], label: str) -> dict[str, Tensor]:
    """Load the tensors of the file on the CPU, in memory of their own, with their strides where nothing overlaps.

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
    """Return `x` with these strides, or `x` itself where they overlap or take far more memory."""
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


SCHEMA = "nanwatch.capsule"
VERSION = 1
DOCUMENT = "capsule.json"
TENSORS = "tensors.safetensors"
# In bytes; Python's objects for it take some twenty times as much.
MAX_DOCUMENT = 1 << 26


class CapsuleError(ValueError):
    """The folder is no complete capsule of a known version. The text names the file and the place in it.

    Examples:
        >>> import nanwatch, os
        >>> os.mkdir("call")
        >>> try:
        ...     nanwatch.Capsule.open("call")
        ... except nanwatch.CapsuleError as error:
        ...     print(str(error).split(";")[0])
        call/capsule.json: No such file or directory
    """


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Raise any error of the block as a CapsuleError that names this file."""
    try:
        yield
    except RecursionError:
        raise CapsuleError(visible(f"{path}: nested too deeply for a capsule")) from None
    except (ValueError, OSError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        advice = f"a capsule is a folder with {DOCUMENT} and {TENSORS}, as nanwatch wrote them"
        raise CapsuleError(
            visible(f"{path}: {reason}; {advice}")
        ) from error  # it may quote a stranger's file


def _read_document(path: Path) -> Json:
    document = json.loads(
        reading.file_text(path, MAX_DOCUMENT, follows_links=False),
        parse_constant=reading.refuse_constant,
        object_pairs_hook=_no_doubles,
    )
    return reading.body(document, SCHEMA, VERSION, "capsule")


def _no_doubles(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has one key twice")
    return found


reading.of(Autocast, device_type=lambda value, where: device(value, where).type, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Module:
    """The module of the call: its name in the watched model, its class, and the device of the call."""

    name: str
    class_: str
    device: str


reading.of(Module, device=_name(device))


@dataclass(frozen=True, slots=True)
class Document:
    """The JSON document, read as far as that goes without the tensors.

    `args`, `kwargs`, `state` and `rng` name what lies in the other file, or is left out.
    """

    label: str
    versions: dict[str, str | None]
    module: Module
    args: list[Any]
    kwargs: dict[str, Any]
    state: dict[str, str]
    training: dict[str, bool]
    rng: dict[str, str]
    autocast: tuple[Autocast, ...]
    finding: Finding | None
    rank: int
    tensors: dict[str, Entry]
    left_out: dict[str, LeftOut]

    @classmethod
    def read(cls, path: Path) -> Document:
        """Read the document. Raises ValueError or OSError."""
        found = _DOCUMENT(_read_document(path), "capsule")
        if "" not in found.training:
            raise ValueError('capsule.training has no "", the flag of the module itself')
        if doubled := sorted(found.tensors.keys() & found.left_out.keys()):
            raise ValueError(
                f"{reading.shorten(doubled[0])} is among both capsule.tensors and capsule.left_out"
            )
        return found

    def fields(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the fields of a Capsule but for its folder, with the tensors of the other file in their places."""
        known: dict[str, Any] = {**self.left_out, **tensors}

        def value(given: Json, where: str) -> Any:
            return read_tree(given, where, known.__getitem__)

        def named(entries: Mapping[str, str], where: str) -> dict[str, Any]:
            return {key: value({"tensor": x}, f"capsule.{where}[{key!r}]") for key, x in entries.items()}

        return {
            "module": self.module.name,
            "class_name": self.module.class_,
            "device": self.module.device,
            "args": tuple(value(x, f"capsule.args[{i}]") for i, x in enumerate(self.args)),
            "kwargs": {key: value(x, f"capsule.kwargs[{key!r}]") for key, x in self.kwargs.items()},
            "state": named(self.state, "state"),
            "rng": _rng(named(self.rng, "rng")),
            "left_out": tuple(self.left_out.values()),
            **{name: getattr(self, name) for name in ("training", "autocast", "finding", "rank", "versions")},
        }


_DOCUMENT = reading.of(Document, tensors=reading.mapping_of(read_entry))


def _rng(states: Mapping[str, Any]) -> RngState:
    cuda = [f"cuda:{i}" for i in range(len(states) - 1)]
    if set(states) != {"cpu", *cuda}:
        raise ValueError(
            f"capsule.rng should have cpu and cuda:0 and so on, got {reading.shorten(list(states))}"
        )
    for kind, state in states.items():
        if not isinstance(state, Tensor) or state.dtype is not torch.uint8 or state.dim() != 1:
            raise ValueError(f"capsule.rng[{kind!r}] should be a tensor of bytes")
    try:
        # In a generator of its own: torch checks that such a state can be.
        torch.Generator().set_state(states["cpu"])
    except RuntimeError as error:
        raise ValueError(f"capsule.rng['cpu'] is no random state of this torch: {error}") from None
    return RngState(states["cpu"], tuple(states[kind] for kind in cuda))
