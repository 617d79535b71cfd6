"""Reader of folders of torch.distributed.checkpoint: `.metadata`, a pickle, and .distcp files with parts of tensors.

Each part is a file of torch.save inside a .distcp file. Parts of one tensor are put together again.
"""

from __future__ import annotations

import io
from collections import defaultdict
from pathlib import Path
from typing import Any

from ...numerics.formats import BY_NAME
from ..inert_pickle import Made
from ..stored import Box, Boxes, Contents, DamagedError, OpenFiles, Span, StoredTensor
from ..zips import Window
from . import pickled

METADATA = ".metadata"
_MOST = 1 << 26


def read(folder: Path) -> Contents:
    """Return the tensors of a folder."""
    path = folder / METADATA
    size = path.stat().st_size
    if size > _MOST:
        raise DamagedError(f"{METADATA} has {size:,} bytes; the most that is read is {_MOST:,}")
    with OpenFiles() as files:
        metadata = pickled.pickled(io.BufferedReader(Window(files, path, 0, size)))
    if not isinstance(metadata, Made) or not metadata.of.endswith(".Metadata"):
        raise DamagedError(f"{METADATA} holds no metadata of torch.distributed.checkpoint")
    places = _places(metadata["storage_data"])
    found = Contents()
    sizes: dict[Path, int | None] = {}
    for name, one in metadata["state_dict_metadata"].members():
        if not isinstance(one, Made) or not one.of.endswith(".TensorStorageMetadata"):
            continue  # the bytes of a pickled object
        tensor = StoredTensor(str(name)[:500], "unknown", (), path)
        try:
            found.tensors.append(_tensor(folder, tensor.name, one, places[tensor.name], sizes))
        except (DamagedError, OSError, ValueError) as error:
            found.tensors.append(StoredTensor(tensor.name, "unknown", (), path, lost=str(error)[:200]))
    missing = sorted(one.name for one, size in sizes.items() if size is None)
    if missing:
        found.problems.append(
            (folder, f"missing: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}")
        )
    return found


_Place = tuple[tuple[int, ...], str, int, int]  # offsets of the part, file, offset and length in it


def _places(storage: Any) -> dict[str, list[_Place]]:
    """Return where the parts of each tensor are."""
    found: dict[str, list[_Place]] = defaultdict(list)
    for index, info in storage.members():
        if not isinstance(index, Made) or not isinstance(info, Made):
            raise DamagedError(f"{METADATA} is damaged")
        fields = dict(index.members() if all(isinstance(key, str) for key, _ in index.members()) else ())
        at, length = info["offset"], info["length"]
        if type(at) is not int or type(length) is not int or min(at, length) < 0:
            raise DamagedError(f"{METADATA} is damaged")
        offsets = fields.get("offset")
        where = () if offsets is None else _numbers(offsets)
        found[str(fields.get("fqn"))].append((where, str(info["relative_path"]), at, length))
    return found


def _tensor(
    folder: Path, name: str, one: Made, places: list[_Place], sizes: dict[Path, int | None]
) -> StoredTensor:
    dtype = next((x for x in _properties(one["properties"]) if x in BY_NAME), "unknown")
    shape = _numbers(one["size"])
    by_offsets = {place[0]: place for place in places}
    if dtype == "unknown":
        return StoredTensor(name, dtype, shape, folder, unread="its dtype has no value per byte")
    boxes = []
    for chunk in one["chunks"]:
        offsets, part = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
        found = by_offsets.get(offsets, by_offsets.get(()))
        if found is None or len(offsets) != len(shape) or len(part) != len(shape):
            raise DamagedError(f"{METADATA} does not say where its part at {list(offsets)} is")
        _, relative, at, length = found
        boxes.append(Box(offsets, part, _span(folder, relative, at, length, dtype, part, sizes)))
    file = boxes[0].span.path if boxes else folder
    width = BY_NAME[dtype].bits // 8
    source = boxes[0].span if len(boxes) == 1 and boxes[0].sizes == shape else Boxes(shape, width, boxes)
    return StoredTensor(name, dtype, shape, file, source)


def _span(
    folder: Path,
    relative: str,
    at: int,
    length: int,
    dtype: str,
    shape: tuple[int, ...],
    sizes: dict[Path, int | None],
) -> Span:
    """Return where the elements of a part are, which is a file of torch.save in a file."""
    path = folder / relative
    if Path(relative).is_absolute() or ".." in Path(relative).parts:
        raise DamagedError(f"{METADATA} names a file outside the folder: {relative[:80]!r}")
    if path not in sizes:
        sizes[path] = path.stat().st_size if path.is_file() else None
    size = sizes[path]
    if size is None:
        raise DamagedError(f"{relative} is missing")
    if at + length > size:
        raise DamagedError(f"it needs bytes up to {at + length:,}, and {relative} has {size:,}")
    parts = pickled.read(path, at, length).tensors
    if len(parts) != 1 or (parts[0].dtype, parts[0].shape, parts[0].order) != (dtype, shape, None):
        raise DamagedError(f"byte {at:,} of {relative} holds no {dtype} {list(shape)}")
    if parts[0].lost or parts[0].unread or not isinstance(parts[0].source, Span):
        raise DamagedError(parts[0].lost or parts[0].unread)
    return parts[0].source


def _properties(made: Any) -> list[str]:
    """Return the names of PyTorch among the properties of a tensor."""
    state = made.state if isinstance(made, Made) else ()
    values = state if isinstance(state, tuple) else [value for _, value in made.members()]
    return [str(one).removeprefix("torch.") for one in values if isinstance(one, str)]


def _numbers(size: Any) -> tuple[int, ...]:
    """Return the sizes of a torch.Size."""
    values = size.arguments[0] if isinstance(size, Made) and size.arguments else size
    if not isinstance(values, tuple) or not all(type(one) is int and 0 <= one < 1 << 62 for one in values):
        raise DamagedError(f"{METADATA} is damaged: sizes that are no numbers")
    return values
