"""Formats of checkpoints: one file each, with `matches(head, path)` and `read(path)`, and a line in FORMATS."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...util import reading
from ..stored import Contents, DamagedError, StoredTensor
from ..zips import opened
from . import dcp, gguf, numpy_files, pickled, safetensors


class Format(NamedTuple):
    """Format of a file: whether one that begins with these bytes is of it, and the reader of its tensors."""

    name: str
    suffixes: tuple[str, ...]
    matches: Callable[[bytes, Path], bool]
    read: Callable[[Path], Contents]


FORMATS = (
    # Before torch.save: a header of 640 bytes begins as a pickle does.
    Format("safetensors", (".safetensors",), safetensors.matches, safetensors.read),
    Format("GGUF", (".gguf",), gguf.matches, gguf.read),
    Format("NumPy", (".npz", ".npy"), numpy_files.matches, numpy_files.read),
    Format("torch.save", (".pt", ".pth", ".bin", ".ckpt"), pickled.matches, pickled.read),
)
"""Formats in the order in which they are tried."""

_SUFFIXES = {suffix for form in FORMATS for suffix in form.suffixes}
_INDEX = ".index.json"
_POINTER = b"version https://"


def read_checkpoint(path: Path) -> Contents:
    """Return the tensors of a file, of an index with its files, or of a folder.

    A file that cannot be read is a problem of the contents. Raises OSError for a path that is not there, ValueError for
    a folder without a checkpoint and a file of no known format.
    """
    if path.is_dir():
        return _folder(path)
    if path.name.endswith(_INDEX):
        return _index(path)
    return _file(path)


def _folder(folder: Path) -> Contents:
    if (folder / dcp.METADATA).is_file():
        return _guarded(dcp.read, folder)
    if indices := sorted(folder.glob(f"*{_INDEX}")):
        return _index(indices[0])
    files = sorted(one for one in folder.iterdir() if one.suffix in _SUFFIXES and one.is_file())
    if not files and any(folder.glob("*.distcp")):
        text = (
            f"{dcp.METADATA} is missing, which torch.distributed.checkpoint writes last: the save did not end"
        )
        return Contents(problems=[(folder, text)])
    if not files:
        kinds = f"no {dcp.METADATA}, no *{_INDEX}, and no file of {', '.join(sorted(_SUFFIXES))}"
        raise ValueError(f"{folder} has no checkpoint: {kinds}")
    found = Contents()
    for one in files:
        found.add(_file(one))
    return found


def _index(path: Path) -> Contents:
    """Read the files that an index of transformers names, and check that they have what it says."""
    try:
        members = json.loads(reading.file_text(path, 1 << 25), parse_constant=reading.refuse_constant)
        names = reading.mapping_of(reading.text)(members["weight_map"], "weight_map")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no index of a checkpoint: {str(error)[:200]}") from None
    found = Contents()
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            found.problems.append((path, f"it names a file outside its folder: {file[:80]!r}"))
        elif not (path.parent / file).is_file():
            found.problems.append((path, f"missing: {file}"))
        else:
            found.add(_file(path.parent / file))
    there = {one.name for one in found.tensors}
    for name in sorted(names.keys() - there):
        found.tensors.append(
            StoredTensor(name, "unknown", (), path, lost=f"{names[name][:80]} does not have it")
        )
    if extra := sorted(there - names.keys()):
        found.remarks.append(
            (path, f"{len(extra)} tensors are not in the index, the first is {extra[0][:80]}")
        )
    return found


def _file(path: Path) -> Contents:
    with opened(path) as file:
        head = file.read(16)
    if not head or head.startswith(_POINTER):
        text = "it is empty: all is lost" if not head else "it is a pointer of Git LFS: run git lfs pull"
        return Contents(problems=[(path, text)])
    form = next((one for one in FORMATS if one.matches(head, path)), None)
    if form is not None:
        return _guarded(form.read, path)
    if path.suffix in _SUFFIXES:
        return Contents(problems=[(path, "it does not begin as a file of its kind does: all is lost")])
    raise ValueError(
        f"{path} is no checkpoint that nanwatch reads: {', '.join(one.name for one in FORMATS)}, a folder of"
        " torch.distributed.checkpoint, or an index of such files"
    )


def _guarded(read: Callable[[Path], Contents], path: Path) -> Contents:
    """Return what the reader finds. Where it refuses the whole file, that is the problem."""
    try:
        return read(path)
    except (DamagedError, OSError, RecursionError, MemoryError) as error:
        return Contents(problems=[(path, str(error)[:300] or f"it is damaged ({type(error).__name__})")])
