"""Tensors in the files of a checkpoint, opened by the library of each format. Nothing in a file is run."""

from __future__ import annotations

import copyreg
import ctypes
import io
import json
import os
import pickle
import re
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import prod
from mmap import MADV_DONTNEED
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias
from zipfile import ZipFile, is_zipfile

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..util.messages import near, needed, spell
from ..util.program import each_module

_SUFFIXES = (".safetensors", ".gguf", ".npz", ".npy", ".pt", ".pth", ".bin", ".ckpt")
_READS = "safetensors, GGUF, NumPy and torch.save, an index of such files, a folder of them or of DCP"
_INDEX, _METADATA = ".index.json", ".metadata"
_SHARD = re.compile(r"(.*)\d{5}-of-(\d{5})(\..*)")  # as transformers and llama.cpp number files
_AROUND = 1 << 16  # bytes that Linux maps around a page, from a multiple of them on
libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Problem:
    """Fault, which makes a checkpoint unsound, or something that is worth a look.

    `kind` is "file", "lost", "non-finite", "mask", "zeros", "dead", "range", "outlier" or "not checked".
    """

    kind: str
    is_fault: bool
    text: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = f"{', '.join(self.tensors)}: " if self.tensors else ""
        return f"{self.kind:<12} {names}{self.text}"


class Stored(NamedTuple):
    """One tensor of a checkpoint, in a file that is mapped at the addresses `regions`.

    `load` returns the tensor, or rows of bytes in GGUF's `encoding`, which stand for `shape` elements.
    """

    file: Path
    regions: Sequence[range]
    name: str
    load: Callable[[], Tensor]
    encoding: Any = None
    shape: tuple[int, ...] = ()

    def parts(self, x: Tensor, step: int) -> Sequence[Tensor]:
        """Return parts of `step` elements in C order: a power of two from 2**13 on gives whole blocks of GGUF."""
        flat = x.reshape(-1)
        flat = flat.view(torch.uint8) if flat.dtype is torch.bool else flat  # a file may have any byte there
        length = step if self.encoding is None else step * flat.numel() // prod(self.shape)
        # A view takes a tenth of the read of 1 MiB.
        return flat.split(length) if flat.numel() > length else (flat,)

    def decode(self, part: Tensor) -> Tensor:
        """Return the elements of a part."""
        if self.encoding is None:
            return part
        with np.errstate(all="ignore"):
            return torch.from_numpy(import_module("gguf").dequantize(part.numpy(), self.encoding))

    def release(self, *tensors: Tensor) -> None:
        """Give the mapped pages of these back to the kernel, no others: the program may have mapped the file too."""
        for region in self.regions:
            if inside := [x for x in tensors if x.data_ptr() in region]:
                first = max(min(x.data_ptr() for x in inside) // _AROUND * _AROUND, region.start)
                last = min(max(x.data_ptr() + x.nbytes for x in inside) + _AROUND, region.stop)
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTNEED)


Entries: TypeAlias = Iterator[Stored | Problem]
_Fields: TypeAlias = Iterator[tuple[Any, ...] | Problem]  # of Stored, from `name` on


def open_checkpoint(path: Path) -> Entries:
    """Yield the tensors of a file, of an index with its files, or of a folder, and what cannot be read."""
    if not path.exists():
        raise FileNotFoundError(f"there is no {str(path)!r}: scan reads {_READS}{near(path)}")
    files = sorted(x for x in path.glob("*") if x.suffix in _SUFFIXES and x.is_file())
    if not path.is_dir():
        yield from _index(path) if path.name.endswith(_INDEX) else _file(path)
    elif (path / _METADATA).is_file():
        yield from _entries(_dcp, path)
    elif indices := sorted(path.glob(f"*{_INDEX}")):
        yield from _index(indices[0], files)
    elif files:
        yield from _files(path, {shard for file in files for shard in _all_shards(file)})
    elif any(path.glob("*.distcp")):
        yield _fault(path, f"{_METADATA} is missing, which {DCP} writes last: the save did not end")
    else:
        raise ValueError(f"{path} has no checkpoint: no {_METADATA}, *{_INDEX} or any {', '.join(_SUFFIXES)}")


def _fault(path: Path, text: str) -> Problem:
    return Problem("file", True, f"{path}: {text}")


def _index(path: Path, files: Sequence[Path] = ()) -> Entries:
    """Open the files that an index of transformers names, and these in its folder. What they lack is lost."""
    try:
        file_of = {name: str(file) for name, file in json.loads(path.read_bytes())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no index of a checkpoint: {spell(error)}") from None
    for entry in _files(path.parent, {*file_of.values(), *(x.name for x in files)}):
        file_of.pop(getattr(entry, "name", ""), None)
        yield entry
    for name, file in sorted(file_of.items()):
        yield Problem("lost", True, f"{file[:80]} does not have it", (name,))


def _all_shards(file: Path) -> Iterator[str]:
    yield file.name
    if match := _SHARD.fullmatch(file.name):
        before, total, after = match.groups()
        first = int(not file.with_name(f"{before}00000-of-{total}{after}").is_file())
        yield from (f"{before}{number + first:05}-of-{total}{after}" for number in range(int(total)))


def _files(folder: Path, names: set[str]) -> Entries:
    for name in sorted(names):
        if Path(name).name == name and (folder / name).is_file():
            yield from _file(folder / name)
        else:
            yield _fault(folder, f"it has no file {name[:80]!r}")


def _file(path: Path) -> Entries:
    if not path.is_file():
        raise ValueError(f"{path} is no regular file")
    with path.open("rb") as file:
        head = file.read(16)
    if not head or head.startswith(b"version https://"):
        yield _fault(path, "it is a pointer of Git LFS: run git lfs pull" if head else "it is empty")
    elif head.startswith(b"GGUF"):
        yield from _entries(_gguf_file, path)
    elif head.startswith(b"\x93NUMPY") or (head.startswith(b"PK\x03\x04") and path.suffix == ".npz"):
        yield from _entries(_numpy_file, path)
    elif head[8:9] == b"{":  # before the next: a header of 640 bytes begins as a pickle does
        yield from _entries(_safetensors_file, path)
    elif head.startswith((b"PK\x03\x04", b"\x80")):
        yield from _entries(_torch_file, path)
    elif path.suffix in _SUFFIXES:
        yield _fault(path, "it does not begin as a file of its kind does")
    else:
        raise ValueError(f"{path} is no checkpoint that nanwatch reads, which are {_READS}")


def _entries(reader: Callable[[Path], _Fields], path: Path) -> Entries:
    """Yield what a reader does: names and what loads each. A damaged file makes a library raise any error."""
    line = rb"^(\w+)-(\w+) .*? %s$" % re.escape(os.fsencode(os.path.realpath(path)))
    regions: Sequence[range] | None = None
    try:
        for fields in reader(path):
            if regions is None:  # the library has mapped the file by now
                ends = re.findall(line, Path("/proc/self/maps").read_bytes(), re.MULTILINE)
                regions = [range(int(begin, 16), int(end, 16)) for begin, end in ends]
            yield fields if isinstance(fields, Problem) else Stored(path, regions, *fields)
    except ImportError:
        raise
    except Exception as error:
        is_fault = "Python objects" not in str(error)  # of an array in .npy
        kind = "file" if is_fault else "not checked"
        yield Problem(kind, is_fault, f"{path}: it cannot be read: {spell(error)}")


def _safetensors_file(path: Path) -> _Fields:
    opened = needed("safetensors.torch", path.name, "scan").safe_open(path, framework="pt")
    yield from ((name, partial(opened.get_tensor, name)) for name in opened.keys())  # noqa: SIM118 - no dict


# NumPy's arrays and scalars lie in many checkpoints, and making them runs no code of the file.
_MADE_BY = {"_reconstruct": np.zeros(0).__reduce__()[0], "scalar": np.float32(0).__reduce__()[0]}
_NUMPY: list[Any] = [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"]}]
for _core in ("core", "_core"):  # as NumPy 1 and 2 call it
    _NUMPY += [(call, f"numpy.{_core}.multiarray.{name}") for name, call in _MADE_BY.items()]
_PROGRAMS = {"constants.pkl": "TorchScript", "archive_format": "torch.export"}  # by a file in their archives


def _torch_file(path: Path) -> _Fields:
    names = {Path(name).name for name in ZipFile(path).namelist()} if is_zipfile(path) else set()
    try:
        for name in names & _PROGRAMS.keys():
            raise pickle.UnpicklingError(f"a program of {_PROGRAMS[name]}; save its state_dict")
        with warnings.catch_warnings(), torch.serialization.safe_globals(_NUMPY):
            warnings.simplefilter("ignore")
            # A file of before PyTorch 1.6 is no archive and cannot be mapped.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=bool(names))
    except pickle.UnpicklingError as error:
        # The error around the reason advises to run what is in the file.
        reason = spell(error.__context__ or error).partition(". ")[0]
        yield Problem("not checked", False, f"{path}: it is refused: {reason}")
    else:
        yield from ((".".join(keys) or "tensor", x.detach) for keys, x in tensors_in(content))


def _numpy_file(path: Path) -> _Fields:
    content: Any = np.load(path, mmap_mode="c", allow_pickle=False)
    arrays = {path.stem: content} if isinstance(content, np.ndarray) else content
    yield from ((name, lambda name=name: _native(arrays[name])) for name in arrays)


def _native(array: Any) -> Tensor:
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _gguf_file(path: Path) -> _Fields:
    for entry in needed("gguf", "a GGUF file", "scan").GGUFReader(path, "c").tensors:
        data, encoding = torch.from_numpy(entry.data), entry.tensor_type
        data = data.view(torch.bfloat16) if encoding.name == "BF16" else data
        is_encoded = data.dtype is torch.uint8
        yield entry.name, data.detach, encoding if is_encoded else None, tuple(entry.shape[::-1].tolist())


DCP = "torch.distributed.checkpoint"
_RECORDS = (f"{DCP}.metadata", f"{DCP}.filesystem", "pathlib")  # modules, of which any class may be made
_PLAIN = (torch.Size, OrderedDict, copyreg.dispatch_table[torch.layout](torch.strided)[0])


class _Metadata(pickle.Unpickler):
    """Reader of `.metadata`, which makes DCP's own records, and calls no other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return lambda enum, member: enum[member]  # as Python 3.11.0 to 3.11.3 pickle a member
        # A damaged name imports no module. Those of DCP's records are imported.
        value = vars(sys.modules.get(module, _Metadata)).get(name)
        is_record = isinstance(value, type) and value.__module__.startswith(_RECORDS)
        if is_record or isinstance(value, torch.dtype | torch.layout) or any(value is x for x in _PLAIN):
            return value
        raise pickle.UnpicklingError(f"{_METADATA} would import {module[:80]}.{name[:80]}")


def _dcp(folder: Path) -> _Fields:
    dcp: Any = import_module(DCP)  # takes 0.3 s
    metadata = _Metadata(io.BytesIO((folder / _METADATA).read_bytes())).load()
    reader = dcp.FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, True)

    def load(name: str, entry: Any) -> Tensor:
        covered, numel = sum(prod(chunk.sizes) for chunk in entry.chunks), prod(entry.size)
        if covered != numel:
            raise ValueError(f"its parts hold {covered:,} of {numel:,} elements")
        x, planner = torch.empty(entry.size, dtype=entry.properties.dtype), dcp.DefaultLoadPlanner()
        planner.set_up_planner({name: x}, metadata, True)
        reader.read_data(planner.create_local_plan(), planner).wait()
        return x

    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            yield name, partial(load, name, entry)


_SCALARS = (int, float, complex, str, bytes, type(None), type, ModuleType, FunctionType)
# A pickle of an object with one of these of its own does not hold its attributes; an optimizer's does.
_PICKLING = ("__getstate__", "__reduce__", "__reduce_ex__")
_FRACTIONS = "efdFD"  # NumPy's codes of the floating-point dtypes that PyTorch has


def tensors_in(content: Any) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield each tensor and array of floats that a pickle of `content` would hold, with the keys that lead there."""
    seen, pending = set[int](), list[tuple[tuple[str, ...], Any]]([((), content)])
    while pending:
        keys, value = pending.pop()
        if isinstance(value, Tensor):
            yield keys, value
        elif isinstance(value, _SCALARS):
            continue  # also NumPy's float64, a float: a best loss begins as inf
        elif isinstance(value, np.ndarray | np.generic) and value.dtype.char in _FRACTIONS:
            yield keys, _native(np.array(value))
        elif id(value) not in seen:
            seen.add(id(value))
            pending += [((*keys, str(key)), child) for key, child in reversed(_children(value))]


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, nn.Module):
        tensors = [(path, {**module._parameters, **module._buffers}) for path, module in each_module(value)]
        return [(f"{path}.{key}".removeprefix("."), x) for path, named in tensors for key, x in named.items()]
    if isinstance(value, Mapping):
        return [(key if isinstance(key, str | int) else type(key).__name__, value[key]) for key in value]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [*enumerate(value)]
    is_plain = all(getattr(type(value), name, None) is getattr(object, name, None) for name in _PICKLING)
    is_plain |= isinstance(value, Optimizer)
    return [*getattr(value, "__dict__", {}).items()] if is_plain else []
