"""Reader of folders of torch.distributed.checkpoint: `.metadata`, a pickle, and .distcp files with parts of tensors.

Each part is a file of torch.save inside a .distcp file. Parts of one tensor are put together again.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from ...numerics.formats import BY_NAME
from ..inert_pickle import Made, load
from ..stored import Box, Boxes, Contents, DamagedError, Source, StoredTensor, are_sizes, whole
from ..zips import opened
from . import pickled

METADATA = ".metadata"
_Place = tuple[str, int, int]  # file, offset and length in it


def read(folder: Path) -> Contents:
    """Return the tensors of a folder."""
    with opened(folder / METADATA) as file:
        metadata = load(file, set())
    if not isinstance(metadata, Made) or not metadata.of.endswith(".Metadata"):
        raise DamagedError(f"{METADATA} holds no metadata of torch.distributed.checkpoint")
    places = _places(metadata["storage_data"])
    found = Contents()
    missing: set[str] = set()
    for name, one in metadata["state_dict_metadata"].members():
        if not isinstance(one, Made) or not one.of.endswith(".TensorStorageMetadata"):
            continue  # the bytes of a pickled object
        tensor = StoredTensor(str(name)[:500], "unknown", (), folder / METADATA)
        try:
            tensor = _tensor(folder, tensor, one, places[tensor.name])
        except FileNotFoundError as error:
            missing.add(Path(error.filename).name)
            tensor = tensor._replace(lost=f"{Path(error.filename).name} is missing")
        except (DamagedError, OSError, ValueError) as error:
            tensor = tensor._replace(lost=str(error)[:200])
        found.tensors.append(tensor)
    if missing:
        shown = f"{', '.join(sorted(missing)[:5])}{', ...' if len(missing) > 5 else ''}"
        found.problems.append((folder, f"missing: {shown}"))
    return found


def _places(storage: Any) -> dict[str, dict[tuple[int, ...], _Place]]:
    """Return where the parts of each tensor are, by their offsets."""
    found: dict[str, dict[tuple[int, ...], _Place]] = defaultdict(dict)
    for index, info in storage.members():
        if not isinstance(index, Made) or not isinstance(info, Made):
            raise DamagedError(f"{METADATA} is damaged")
        fields = {str(key): value for key, value in index.members()}
        where = () if fields.get("offset") is None else _numbers(fields["offset"])
        at, length = _numbers((info["offset"], info["length"]))
        found[str(fields.get("fqn"))][where] = str(info["relative_path"]), at, length
    return found


def _tensor(
    folder: Path, tensor: StoredTensor, one: Made, places: dict[tuple[int, ...], _Place]
) -> StoredTensor:
    dtype = next((x for x in _properties(one["properties"]) if x in BY_NAME), "unknown")
    tensor = tensor._replace(dtype=dtype, shape=_numbers(one["size"]))
    if dtype == "unknown":
        return tensor._replace(unread="its dtype has no value per byte")
    boxes = []
    for chunk in one["chunks"]:
        offsets, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
        place = places.get(offsets, places.get(()))
        if place is None or not len(offsets) == len(sizes) == len(tensor.shape):
            raise DamagedError(f"{METADATA} does not say where its part at {list(offsets)} is")
        boxes.append(Box(offsets, sizes, _part(folder, place, dtype, sizes)))
    is_one = len(boxes) == 1 and boxes[0].sizes == tensor.shape
    source = boxes[0].source if is_one else Boxes(tensor.shape, BY_NAME[dtype].bits // 8, boxes)
    return tensor._replace(source=source)


def _part(folder: Path, place: _Place, dtype: str, shape: tuple[int, ...]) -> Source:
    """Return where the elements of a part are, which is a file of torch.save in a file."""
    relative, at, length = place
    path = folder / relative
    if Path(relative).is_absolute() or ".." in Path(relative).parts:
        raise DamagedError(f"{METADATA} names a file outside the folder: {relative[:80]!r}")
    if lost := whole(path, at, length, path.stat().st_size):
        raise DamagedError(lost)
    parts = pickled.read_part(path, at, at + length).tensors
    if len(parts) != 1 or (parts[0].dtype, parts[0].shape, parts[0].order) != (dtype, shape, None):
        raise DamagedError(f"byte {at:,} of {relative} holds no {dtype} {list(shape)}")
    if parts[0].lost or parts[0].unread or parts[0].source is None:
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
    if not are_sizes(values):
        raise DamagedError(f"{METADATA} is damaged: sizes that are no numbers")
    return tuple(values)
