"""Reader of files of torch.save: .pt, .pth, .bin, both the zip archive and the one before PyTorch 1.6.

No class is imported and no function called: the pickle is read as a description (`inert_pickle`), of which the tensors
are taken. So it also reads checkpoints that torch.load(weights_only=True) refuses, and names what they would run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ...numerics.formats import NUMBER_FORMATS
from ..encodings import bytes_of
from ..inert_pickle import Global, Made, load
from ..stored import Contents, DamagedError, OpenFiles, Span, StoredTensor, are_sizes, whole
from ..zips import MAGIC, Member, members, opened, walked

_LEGACY = 0x1950A86A20F9469CFC6C
_STORAGES = {form.scalar_type: form.name for form in NUMBER_FORMATS}
_KNOWN = ("torch.", "collections.OrderedDict", "_codecs.encode", "numpy.", "builtins.set", "builtins.dict")
_ARRAYS = {
    f"numpy.{core}.multiarray.{call}" for core in ("core", "_core") for call in ("_reconstruct", "scalar")
}
_FRACTIONS = {"f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128"}
_SHOWN = 4  # global names that a remark lists
_NEAR = 1000  # objects inside a tensor subclass among which its tensor is looked for


class _Storage(NamedTuple):
    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        return bytes_of(self.dtype, self.numel) or self.numel


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file that begins like this is read here."""
    return head[:4] == MAGIC or head[:1] == b"\x80"


def read(path: Path) -> Contents:
    """Return the tensors of a file."""
    size = path.stat().st_size
    with opened(path) as file:
        if file.read(4) != MAGIC:
            return _read_legacy(path, size)
    sizes: dict[str, int] = {}
    try:
        return _read_members(path, members(path), size, sizes)
    except DamagedError as error:
        if "directory" not in str(error):
            raise
        found = _read_members(path, walked(path, 0, size, sizes), size, sizes)
        found.problems.append((path, f"{error}; its members were looked for one by one"))
        return found


def read_part(path: Path, begin: int, end: int) -> Contents:
    """Return the tensors of a part of a file that torch.save has written."""
    sizes: dict[str, int] = {}
    return _read_members(path, walked(path, begin, end, sizes), end, sizes)


def _read_members(path: Path, archive: Iterable[Member], end: int, sizes: dict[str, int]) -> Contents:
    """Return the tensors of an archive. Puts the sizes of its members into `sizes` once they are known."""
    places: dict[str, int] = {}
    names: set[str] = set()
    root: Any = None
    for member in archive:
        folder, _, name = member.name.partition("/")
        if member.info is not None:
            continue
        if name.startswith("data/"):
            places[name[5:]] = member.begin
        elif name == "data.pkl":
            with opened(path, member.begin) as file:
                root = load(file, names)
                sizes[member.name] = file.tell() - member.begin
            sizes.update((f"{folder}/data/{one.key}", one.nbytes) for one in _storages(root))
        elif name == "byteorder":
            with opened(path, member.begin) as file:
                if file.read(3) == b"big":
                    raise DamagedError("its numbers are big-endian, which is not read")
    if root is None:
        raise DamagedError("it has no data.pkl, or that is cut off: all is lost")
    return Contents([*_tensors(root, path, places, end)], remarks=_remarks(names, path))


def _read_legacy(path: Path, size: int) -> Contents:
    """Read the form before PyTorch 1.6: four pickles, the keys of the storages, each storage behind its length."""
    names: set[str] = set()
    with opened(path) as file:
        if load(file, set()) != _LEGACY:
            raise DamagedError("it is a pickle, and no file of torch.save")
        load(file, set())
        load(file, set())
        root = load(file, names)
        keys = load(file, set())
        at = file.tell()
    known = {one.key: one for one in _storages(root)}
    places: dict[str, int] = {}
    for key in keys if isinstance(keys, list) else ():
        if (one := known.get(str(key))) is None:
            break
        places[one.key] = at + 8
        at += 8 + one.nbytes
    found = Contents([*_tensors(root, path, places, size)], remarks=_remarks(names, path))
    if at > size:
        found.problems.append((path, f"truncated: its tensors need {at:,} bytes, and it has {size:,}"))
    return found


def _remarks(names: set[str], path: Path) -> list[tuple[Path, str]]:
    """Return the remark on what is no part of a checkpoint of tensors."""
    foreign = sorted(one for one in names if not one.startswith(_KNOWN))
    if not foreign:
        return []
    shown = ", ".join(one[:80] for one in foreign[:_SHOWN]) + (", ..." if len(foreign) > _SHOWN else "")
    return [(path, f"torch.load would import and may call {shown}. Nothing of it was run here")]


def _order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions from the slowest to the fastest, None where the elements do not lie together."""
    in_order = tuple(range(len(shape)))
    if 0 in shape:
        return in_order
    large = sorted((d for d in in_order if shape[d] != 1), key=lambda d: (-strides[d], d))
    expected = 1
    for d in reversed(large):
        if strides[d] != expected:
            return None
        expected *= shape[d]
    return in_order if large == sorted(large) else (*(d for d in in_order if shape[d] == 1), *large)


def _walk(root: Any) -> Iterator[tuple[str, Made]]:
    """Yield each Made with the first path to it, and a tensor with each path to it."""
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        name, value = left.pop()
        if not isinstance(value, Made | list | tuple):
            continue
        if isinstance(value, Made) and (id(value) not in seen or _is_tensor(value)):
            yield name, value
        if id(value) in seen:
            continue
        seen.add(id(value))
        parts: list[tuple[Any, Any]]
        if isinstance(value, Made):
            parts = [*value.members(), *enumerate(value.items), *(("", one) for one in value.arguments)]
            parts.append(("", None if isinstance(value.state, Made) else value.state))
        else:
            parts = list(enumerate(value))
        for key, one in reversed(parts):
            part = str(key)[:500] if isinstance(key, str | int | float) else "?"
            left.append((f"{name}.{part}" if name and part else name or part, one))


def _is_tensor(made: Made) -> bool:
    return (made.of.startswith("torch.") and "_rebuild" in made.of) or made.of in _ARRAYS


def _storages(root: Any) -> Iterator[_Storage]:
    return (one for _, made in _walk(root) if (one := _storage(made)) is not None)


def _storage(made: Any, dtype: str = "") -> _Storage | None:
    """Return the storage that a persistent name stands for."""
    pid = made.arguments[0] if isinstance(made, Made) and made.of == "persistent" else ()
    if not isinstance(pid, tuple) or len(pid) < 5 or not are_sizes(pid[4:5]):
        return None
    kind = str(pid[1]).rpartition(".")[2].removesuffix("Storage")
    return _Storage(str(pid[2])[:200], dtype or _STORAGES.get(kind, "uint8"), pid[4])


def _tensors(root: Any, path: Path, places: dict[str, int], end: int) -> Iterator[StoredTensor]:
    """Yield the tensors in a pickle by the names under which they lie."""
    named: set[str] = set()
    inside: set[int] = set()  # a tensor that makes another, as a Parameter's
    for name, made in _walk(root):
        if id(made) in inside or not _is_tensor(made):
            continue
        unique, count = name or "tensor", 1
        while unique in named:
            unique, count = f"{name}#{count}", count + 1
        if (tensor := _tensor(made, StoredTensor(unique, "unknown", (), path), places, end)) is not None:
            named.add(unique)
            inside.update(id(one) for _, one in _walk(made) if one is not made)
            yield tensor


class _Held(NamedTuple):
    """Bytes that stand in the pickle itself."""

    data: bytes

    def read(self, files: OpenFiles, begin: int, into: memoryview) -> None:
        into[:] = self.data[begin : begin + len(into)]


def _array(made: Made, found: StoredTensor) -> StoredTensor | None:
    """Return a NumPy array or number of a floating-point dtype; None for any other."""
    state = (
        made.state
        if isinstance(made.state, tuple)
        else ((), (), *made.arguments[:1], False, *made.arguments[1:])
    )
    if len(state) != 5 or not isinstance(state[2], Made) or not are_sizes(state[1]):
        return None
    _, shape, dtype, is_fortran, data = state
    name = _FRACTIONS.get(str(dtype.arguments[0])) if dtype.arguments else None
    if name is None:
        return None
    found = found._replace(dtype=name, shape=shape)
    if isinstance(data, Made):  # text, in the protocol that torch.save uses
        data = str(data.arguments[0]).encode("latin-1", "replace") if data.arguments else b""
    if not isinstance(data, bytes) or len(data) != found.nbytes:
        return found._replace(unread="its description is damaged")
    if isinstance(dtype.state, tuple) and dtype.state[1:2] == (">",):
        return found._replace(unread="a big-endian NumPy array")
    order = tuple(reversed(range(len(shape)))) if is_fortran and len(shape) > 1 else None
    return found._replace(source=_Held(data), order=order)


def _tensor(made: Made, found: StoredTensor, places: dict[str, int], end: int) -> StoredTensor | None:
    """Return the tensor that a call of torch's would make; None for what only holds one."""
    call, arguments = made.of.rpartition(".")[2], made.arguments
    if made.of in _ARRAYS:
        return _array(made, found)
    if call in ("_rebuild_parameter", "_rebuild_parameter_with_state") and arguments:
        inner = arguments[0]
        return _tensor(inner, found, places, end) if isinstance(inner, Made) else None
    if call == "_rebuild_from_type_v2":
        parts = {id(one): one for _, one in islice(_walk(made), 1, _NEAR) if _is_tensor(one)}
        if len(parts) > 1:  # as of a jagged tensor: each is named by itself
            return None
        if parts:
            return _tensor(parts.popitem()[1], found, places, end)
        is_plain = len(arguments) > 2 and isinstance(arguments[0], Global) and isinstance(arguments[2], tuple)
        return _tensor(Made(arguments[0], arguments[2]), found, places, end) if is_plain else None
    if call not in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        return found._replace(unread=f"made by {call[:60]}")
    dtype = str(arguments[6]).removeprefix("torch.") if call.endswith("v3") and len(arguments) > 6 else ""
    storage = _storage(arguments[0], dtype) if arguments else None
    if storage is None or len(arguments) < 4 or not all(map(are_sizes, (arguments[1:2], *arguments[2:4]))):
        return found._replace(unread="its description is damaged")
    offset, shape, strides = arguments[1:4]
    if len(shape) != len(strides):
        return found._replace(unread="its description is damaged")
    found = found._replace(dtype=storage.dtype, shape=shape)
    if not (width := bytes_of(storage.dtype, 1)):
        return found._replace(unread=f"dtype {storage.dtype[:40]} has no value per byte")
    place, order = places.get(storage.key), _order(shape, strides)
    # `numel` of the third form's storage is a number of bytes.
    held = storage.numel if dtype else storage.nbytes
    if offset * width + found.nbytes > held and found.numel and order is not None:
        return found._replace(lost=f"it needs more elements than the {storage.numel:,} of its storage")
    if place is None:
        return found._replace(lost=f"its storage {storage.key[:40]} is not in the file")
    if order is None:
        return found._replace(unread=f"a view with strides {strides}")
    source = Span(path := found.file, place + offset * width)
    if order == tuple(range(len(order))):
        order = None
    return found._replace(source=source, lost=whole(path, source.offset, found.nbytes, end), order=order)
