"""Tensors in the files of a checkpoint, opened by the library of each format. Nothing in a file is run.

A mapped tensor takes memory only for the pages that are read, and `pieces` gives these back.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import EnumMeta
from functools import partial
from math import lcm, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..numerics._fingerprint import BLOCK
from ..util.imports import needed
from ..util.visible import first_few, spell
from .contents import tensors_in

_EXTRA = "scan"
PIECE = 4 << 20  # bytes: large enough for all cores, and small beside PyTorch's own 200 MiB
_MOST_HEADER = 100 << 20  # bytes; safetensors accepts no more
_SUFFIXES = (".safetensors", ".gguf", ".npz", ".npy", ".pt", ".pth", ".bin", ".ckpt")
_INDEX, _METADATA = ".index.json", ".metadata"
_DONTNEED, _LARGE_PAGE = 4, 2 << 20  # of madvise(2), and of memory
_libc = ctypes.CDLL(None)


class Stored(NamedTuple):
    """One tensor of a checkpoint. `lost` says why its values are not in the file.

    `load` returns the tensor, or the blocks of bytes of an `encoding` of GGUF, which stands for `shape` elements.
    `regions` are the addresses at which the file is mapped.
    """

    name: str
    file: Path
    load: Callable[[], Tensor] | None = None
    lost: str = ""
    encoding: Any = None
    shape: tuple[int, ...] = ()
    regions: tuple[range, ...] = ()

    def pieces(self, x: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the parts of the loaded tensor in C order: the first element's number, the bytes, and the elements.

        The mapped pages of a part leave this process's memory when the next one is asked for.
        """
        flat, block = x.detach().reshape(-1), (1, x.element_size())
        if flat.dtype is torch.bool:
            flat = flat.view(torch.uint8)  # a file may have any byte there
        if self.encoding is not None:
            block = _gguf().GGML_QUANT_SIZES[self.encoding]
        unit = lcm(block[1], BLOCK)
        step = max(PIECE // unit, 1) * unit // flat.element_size()
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            element = start * flat.element_size() // block[1] * block[0]
            yield element, part, part if self.encoding is None else self._decoded(part, block[1])
            self.release(part)

    def _decoded(self, part: Tensor, block_bytes: int) -> Tensor:
        with np.errstate(all="ignore"):
            values = _gguf().dequantize(part.numpy().reshape(-1, block_bytes), self.encoding)
        return torch.from_numpy(values).flatten()

    def release(self, part: Tensor) -> None:
        """Give the pages of a mapped part back. Other parts stay as they are."""
        begin, end = part.data_ptr(), part.data_ptr() + part.nbytes
        for region in self.regions:  # memory that is not mapped would lose its content
            if region.start <= begin and end <= region.stop:
                # A page fault maps pages before it too, up to a large page, which were given back already.
                begin = max(begin - begin % _LARGE_PAGE, region.start)
                _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED)
                return


def _regions(path: Path) -> tuple[range, ...]:
    """Return the addresses at which this process has mapped the file."""
    name, regions = os.path.realpath(path), []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, *_, mapped = line.rstrip("\n").split(maxsplit=5)
            if mapped == name:
                begin, end = (int(address, 16) for address in addresses.split("-"))
                regions.append(range(begin, end))
    return tuple(regions)


@dataclass(slots=True)
class Contents:
    """Tensors of one or several files, and the problems of files that cannot be read whole, each with its path."""

    tensors: list[Stored] = field(default_factory=list)
    problems: list[tuple[Path, str]] = field(default_factory=list)

    def add(self, more: Contents) -> None:
        """Add the tensors of more files."""
        self.tensors += more.tensors
        self.problems += more.problems


def open_checkpoint(path: Path) -> Contents:
    """Return the tensors of a file, of an index with its files, or of a folder.

    A file that cannot be read is a problem of the contents. Raises OSError for a path that is not there, ValueError for
    a folder without a checkpoint and a file of no known format, ImportError for a package that reads the format.
    """
    if path.is_dir():
        return _folder(path)
    if path.name.endswith(_INDEX):
        return _index(path)
    return _file(path)


def _folder(folder: Path) -> Contents:
    if (folder / _METADATA).is_file():
        return _guarded(_dcp, folder)
    if indices := sorted(folder.glob(f"*{_INDEX}")):
        return _index(indices[0])
    files = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES and file.is_file())
    if not files and any(folder.glob("*.distcp")):
        text = f"{_METADATA} is missing, which torch.distributed.checkpoint writes last: the save did not end"
        return Contents(problems=[(folder, text)])
    if not files:
        raise ValueError(
            f"{folder} has no checkpoint: no {_METADATA}, no *{_INDEX}, and no file of {', '.join(_SUFFIXES)}"
        )
    contents = Contents()
    for file in files:
        contents.add(_file(file))
    return contents


def _index(path: Path) -> Contents:
    """Open the files that an index of transformers names. What they lack of it is lost."""
    try:
        file_names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(file) for file in file_names.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no index of a checkpoint: {spell(error)}") from None
    contents = Contents()
    for file in files:
        if Path(file).name != file:
            contents.problems.append((path, f"it names a file outside its folder: {file[:80]!r}"))
        elif not (path.parent / file).is_file():
            contents.problems.append((path, f"missing: {file}"))
        else:
            contents.add(_file(path.parent / file))
    names = {tensor.name for tensor in contents.tensors}
    for name in sorted(file_names.keys() - names):
        lost = f"{str(file_names[name])[:80]} does not have it"
        contents.tensors.append(Stored(name, path, lost=lost))
    return contents


def _file(path: Path) -> Contents:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file")
    with path.open("rb") as file:
        head = file.read(16)
    if not head or head.startswith(b"version https://"):
        text = "it is empty" if not head else "it is a pointer of Git LFS: run git lfs pull"
        return Contents(problems=[(path, text)])
    if (reader := _reader(head, path.suffix)) is not None:
        return _guarded(reader, path)
    if path.suffix in _SUFFIXES:
        return Contents(problems=[(path, "it does not begin as a file of its kind does")])
    raise ValueError(
        f"{path} is no checkpoint that nanwatch reads: safetensors, GGUF, NumPy, torch.save, a folder of"
        " torch.distributed.checkpoint, or an index of such files"
    )


def _reader(head: bytes, suffix: str) -> Callable[[Path], Contents] | None:
    if head.startswith(b"GGUF"):
        return _gguf_file
    if head.startswith(b"\x93NUMPY") or (head.startswith(b"PK\x03\x04") and suffix == ".npz"):
        return _numpy_file
    if head[8:9] == b"{":  # before the next: a header of 640 bytes begins as a pickle does
        return _safetensors_file
    return _torch_file if head.startswith((b"PK\x03\x04", b"\x80")) else None


def _guarded(reader: Callable[[Path], Contents], path: Path) -> Contents:
    """Return what the reader finds. A damaged file makes a library raise any error, which is the problem then."""
    try:
        return reader(path)
    except ImportError:
        raise
    except Exception as error:
        return Contents(problems=[(path, f"it cannot be read: {spell(error)}")])


def _safetensors_file(path: Path) -> Contents:
    library: Any = needed("safetensors", f"{path.name}", _EXTRA)
    try:
        opened = library.safe_open(path, framework="pt")
    except Exception as error:
        cut = _cut_names(path)
        lost = f", {len(cut):,} tensors are cut off: {first_few(cut)}" if cut else ""
        tensors = [Stored(name, path, lost="it is cut off") for name in cut]
        return Contents(tensors, [(path, f"it cannot be read: {spell(error)}{lost}")])
    regions = _regions(path)
    return Contents(
        [Stored(name, path, partial(opened.get_tensor, name), regions=regions) for name in opened.keys()]  # noqa: SIM118
    )


def _cut_names(path: Path) -> list[str]:
    """Return the tensors whose bytes the file does not have, by its header: safetensors itself opens no such file."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(size, _MOST_HEADER)))
        left = path.stat().st_size - size - 8
        return [name for name, entry in header.items() if entry.get("data_offsets", (0, 0))[1] > left]
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return []


# NumPy's arrays and scalars lie in many checkpoints, and making them runs no code of the file.
_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["All"]},
    *((call, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core")
      for name, call in (("_reconstruct", np.zeros(0).__reduce__()[0]), ("scalar", np.float32(0).__reduce__()[0]))),
]  # fmt: skip


def _torch_file(path: Path) -> Contents:
    with warnings.catch_warnings(), torch.serialization.safe_globals(_NUMPY):
        warnings.simplefilter("ignore")
        with path.open("rb") as file:
            is_archive = file.read(1) == b"P"
        try:
            # The format before PyTorch 1.6 cannot be mapped.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
        except pickle.UnpicklingError as error:
            return Contents(problems=[(path, _refusal(path, error))])
    regions, names, tensors = _regions(path), set[str](), []
    for keys, x in tensors_in(content):
        unique = ".".join(keys) or "tensor"
        while unique in names:
            unique += "'"
        names.add(unique)
        tensors.append(Stored(unique, path, partial(_same, x), regions=regions))
    return Contents(tensors)


def _refusal(path: Path, error: Exception) -> str:
    with suppress(Exception):  # the format before PyTorch 1.6, or a damaged pickle
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
        return f"it is refused: a load would import and may call {first_few([name[:80] for name in names])}"
    reason = re.search(r"(?:WeightsUnpickler error:|Unsupported|Trying to load) .*", str(error))
    return f"it is refused: {reason.group()[:200] if reason else spell(error)}"


def _same(x: Tensor) -> Tensor:
    return x


def _numpy_file(path: Path) -> Contents:
    array = np.load(path, mmap_mode="c", allow_pickle=False)
    if isinstance(array, np.ndarray):
        return Contents([Stored(path.stem, path, partial(_tensor_of, array), regions=_regions(path))])
    return Contents([Stored(name, path, partial(_member, array, name)) for name in array.files])


def _member(archive: Any, name: str) -> Tensor:
    return _tensor_of(archive[name])


def _tensor_of(array: Any) -> Tensor:
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(array)


def _gguf() -> Any:
    return needed("gguf", "a GGUF file", _EXTRA)


def _gguf_file(path: Path) -> Contents:
    reader = _gguf().GGUFReader(path, "c")
    regions, contents = _regions(path), Contents()
    for entry in reader.tensors:
        kind, data = entry.tensor_type, torch.from_numpy(entry.data)
        shape = tuple(int(size) for size in reversed(entry.shape))
        if kind.name == "BF16":
            data = data.view(torch.bfloat16)
        encoding = kind if data.dtype is torch.uint8 else None
        contents.tensors.append(
            Stored(entry.name, path, partial(_same, data), encoding=encoding, shape=shape, regions=regions)
        )
    return contents


_PLAIN = (torch.Size, OrderedDict, torch.serialization._get_layout)


def _member_of(kind: Any, name: str) -> Any:
    if not isinstance(kind, EnumMeta):
        raise pickle.UnpicklingError(f"{_METADATA} would take {name[:80]} of {kind!r:.80}")
    return kind[name]


class _Metadata(pickle.Unpickler):
    """Reader of `.metadata`, which knows DCP's own records, and no class or function besides."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (
            "builtins",
            "getattr",
        ):  # how Python 3.11.0 to 3.11.3 pickle a member of an enum
            return _member_of
        if module.partition(".")[0] in ("torch", "pathlib", "collections") and name.isidentifier():
            value = super().find_class(module, name)
            is_record = isinstance(value, type) and value.__module__.startswith(
                (
                    "torch.distributed.checkpoint.metadata",
                    "torch.distributed.checkpoint.filesystem",
                    "pathlib",
                )
            )
            if is_record or isinstance(value, torch.dtype | torch.layout) or value in _PLAIN:
                return value
        raise pickle.UnpicklingError(f"{_METADATA} would import {module[:80]}.{name[:80]}")


def _dcp(folder: Path) -> Contents:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with (folder / _METADATA).open("rb") as file:
        metadata = _Metadata(file).load()
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, True)
    files = {str(info.relative_path) for info in metadata.storage_data.values()}
    contents = Contents()
    if missing := sorted(file for file in files if not (folder / file).is_file()):
        contents.problems.append((folder, f"missing: {first_few(missing)}"))
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            load = partial(_dcp_tensor, reader, metadata, name)
            contents.tensors.append(Stored(name, folder, load))
    return contents


def _dcp_tensor(reader: Any, metadata: Any, name: str) -> Tensor:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    entry = metadata.state_dict_metadata[name]
    covered = sum(prod(chunk.sizes) for chunk in entry.chunks)
    if covered != prod(entry.size):
        raise ValueError(f"its parts hold {covered:,} of {prod(entry.size):,} elements")
    x = torch.empty(entry.size, dtype=entry.properties.dtype)
    planner = DefaultLoadPlanner()
    planner.set_up_planner({name: x}, metadata, True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return x
