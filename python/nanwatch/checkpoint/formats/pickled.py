"""Reader of files of torch.save: .pt, .pth, .bin, both the zip archive and the one before PyTorch 1.6.

No class is imported and no function called: the pickle is read as a description (`inert_pickle`), of which the tensors
are taken. So it also reads checkpoints that torch.load(weights_only=True) refuses, and names what they would run.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from ...numerics.formats import BY_NAME
from ..inert_pickle import Global, Made, load
from ..stored import Contents, DamagedError, OpenFiles, Span, StoredTensor, whole
from ..zips import Member, Window, content, members, salvaged

_MOST = 1 << 26  # bytes of a pickle: 200 a tensor
_MAGIC = 0x1950A86A20F9469CFC6C
_STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}
_KNOWN = ("torch.", "collections.OrderedDict", "_codecs.encode", "numpy.", "builtins.set", "builtins.dict")
_SHOWN = 4  # global names that a remark lists
_NEAR = 1000  # objects inside a tensor subclass among which its tensor is looked for


class _Storage(NamedTuple):
    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * (BY_NAME[self.dtype].bits // 8 if self.dtype in BY_NAME else 1)


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file that begins like this is read here."""
    return head[:4] == b"PK\x03\x04" or head[:1] == b"\x80"


def read(path: Path, offset: int = 0, size: int | None = None) -> Contents:
    """Return the tensors of a file, or of a part of it that is one."""
    size = path.stat().st_size - offset if size is None else size
    with OpenFiles() as files:
        head = bytearray(min(4, size))
        files.read(path, offset, memoryview(head))
        if head == b"PK\x03\x04":
            return _read_zip(files, path, offset, size)
        return _read_legacy(files, path, size)


def _read_zip(files: OpenFiles, path: Path, offset: int, size: int) -> Contents:
    found = Contents()
    places: dict[str, Span] = {}
    root: Any = None
    names: set[str] = set()
    sizes: dict[str, int] = {}

    def note(member: Member, pickled: bytes | None) -> int | None:
        """Take what is needed of a member, and return the size of one whose size is not written before it."""
        nonlocal root
        part = member.name.partition("/")[2]
        if part.startswith("data/") and not member.deflated:
            places[part[5:]] = member.span
            return sizes.get(part[5:])
        if part == "data.pkl":
            if pickled is None:  # the archive's end is missing: it ends where the pickle does
                reader = io.BufferedReader(
                    Window(files, path, member.span.offset, min(_MOST, offset + size - member.span.offset))
                )
                root = load(reader, names)
                sizes.update((one.key, one.nbytes) for one in _storages(root))
                return reader.tell()
            root = load(io.BytesIO(pickled), names)
        elif part == "byteorder" and pickled == b"big":
            raise DamagedError("its numbers are big-endian, which is not read")
        return None

    try:
        for member in members(files, path, offset, size):
            part = member.name.partition("/")[2]
            wanted = part in ("data.pkl", "byteorder")
            note(member, content(files, member, _MOST) if wanted else b"")
    except DamagedError as error:
        if "directory" not in str(error):
            raise
        found.problems.append((path, f"{error}; its members were looked for one by one"))
        for _ in salvaged(files, path, offset, size, lambda member: note(member, None)):
            pass
    if root is None:
        raise DamagedError("it has no data.pkl, or that is cut off: all is lost")
    found.tensors = [_placed(one, places, offset + size) for one in _tensors(root, path)]
    found.remarks += _refused(names, path)
    return found


def _read_legacy(files: OpenFiles, path: Path, size: int) -> Contents:
    """Read the form before PyTorch 1.6: four pickles, the keys of the storages, each storage behind its length."""
    names: set[str] = set()
    with io.BufferedReader(Window(files, path, 0, size)) as file:
        if load(file, set()) != _MAGIC:
            raise DamagedError("it is a pickle, and no file of torch.save")
        load(file, set())
        load(file, set())
        root = load(file, names)
        keys = load(file, set())
        at = file.tell()
    known = {one.key: one for one in _storages(root)}
    places: dict[str, Span] = {}
    for key in keys if isinstance(keys, list) else ():
        if (one := known.get(str(key))) is None:
            break
        places[one.key] = Span(path, at + 8)
        at += 8 + one.nbytes
    found = Contents([_placed(one, places, size) for one in _tensors(root, path)])
    if at > size:
        found.problems.append((path, f"truncated: its tensors need {at:,} bytes, and it has {size:,}"))
    found.remarks += _refused(names, path)
    return found


def _refused(names: set[str], path: Path) -> list[tuple[Path, str]]:
    """Return the remark on what is no part of a checkpoint of tensors."""
    foreign = sorted(one for one in names if not one.startswith(_KNOWN))
    if not foreign:
        return []
    shown = ", ".join(one[:80] for one in foreign[:_SHOWN]) + (", ..." if len(foreign) > _SHOWN else "")
    return [(path, f"torch.load would import and may call {shown}. Nothing of it was run here")]


class _Found(NamedTuple):
    """Tensor of a pickle: its storage, and its place there in elements. `unread` says why it is no such."""

    name: str
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    path: Path
    unread: str = ""


def _placed(one: _Found, places: dict[str, Span], end: int) -> StoredTensor:
    dtype = one.storage.dtype
    tensor = StoredTensor(one.name, dtype, one.shape, one.path, unread=one.unread)
    if one.unread:
        return tensor
    width = BY_NAME[dtype].bits // 8
    order = _order(one.shape, one.strides)
    if (one.offset + tensor.numel) * width > one.storage.nbytes and tensor.numel and order is not None:
        return replace(tensor, lost=f"it needs more elements than the {one.storage.numel:,} of its storage")
    if (place := places.get(one.storage.key)) is None:
        return replace(tensor, lost=f"its storage {one.storage.key[:40]} is not in the file")
    if order is None:
        return replace(tensor, unread=f"a view with strides {one.strides}")
    source = Span(place.path, place.offset + one.offset * width)
    lost = whole(place.path, source.offset, tensor.nbytes, end)
    in_c_order = order == tuple(range(len(order)))
    return replace(tensor, source=source, lost=lost, order=None if in_c_order else order)


def _order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions from the slowest to the fastest, None where the elements do not lie together."""
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d) if shape[d] != 1 else (0, d))
    expected = 1
    for d in reversed(order):
        if shape[d] != 1 and strides[d] != expected:
            return tuple(range(len(shape))) if 0 in shape else None
        expected *= shape[d]
    large = [d for d in order if shape[d] != 1]
    return tuple(range(len(shape))) if large == sorted(large) else tuple(order)


def _walk(root: Any) -> Iterator[tuple[str, Made]]:
    """Yield each Made with the first path to it, and a tensor with each path to it."""
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        name, value = left.pop()
        if not isinstance(value, Made | list | tuple):
            continue
        if id(value) in seen:
            if isinstance(value, Made) and _is_tensor(value):
                yield name, value
            continue
        seen.add(id(value))
        parts: list[tuple[Any, Any]]
        if isinstance(value, Made):
            yield name, value
            parts = list(value.members())
            parts += [*enumerate(value.items), *(("", one) for one in value.arguments)]
            if not isinstance(value.state, Made):
                parts.append(("", value.state))
        else:
            parts = list(enumerate(value))
        for key, one in reversed(parts):
            part = str(key)[:500] if isinstance(key, str | int | float) else "?"
            left.append((f"{name}.{part}" if name and part else name or part, one))


def _is_tensor(made: Made) -> bool:
    return made.of.startswith("torch.") and "_rebuild" in made.of


def _storages(root: Any) -> Iterator[_Storage]:
    for _, made in _walk(root):
        if made.of == "persistent" and (one := _storage(made)) is not None:
            yield one


def _storage(made: Any, dtype: str = "") -> _Storage | None:
    """Return the storage that a persistent name stands for."""
    pid = made.arguments[0] if isinstance(made, Made) and made.of == "persistent" else ()
    if not isinstance(pid, tuple) or len(pid) < 5 or type(pid[4]) is not int or not 0 <= pid[4] < 1 << 62:
        return None
    kind = str(pid[1]).rpartition(".")[2].removesuffix("Storage")
    return _Storage(str(pid[2])[:200], dtype or _STORAGES.get(kind, "uint8"), pid[4])


def _tensors(root: Any, path: Path) -> Iterator[_Found]:
    """Yield the tensors in a pickle by the names under which they lie."""
    named: set[str] = set()
    inside: set[int] = set()  # a tensor that makes another, as a Parameter's
    for name, made in _walk(root):
        if id(made) in inside or not _is_tensor(made):
            continue
        unique, count = name or "tensor", 1
        while unique in named:
            unique, count = f"{name}#{count}", count + 1
        tensor = _tensor(made, unique, path)
        if tensor is None:
            continue
        named.add(unique)
        inside.update(id(one) for _, one in _walk(made) if one is not made)
        yield tensor


def _tensor(made: Made, name: str, path: Path) -> _Found | None:
    """Return the tensor that a call of torch's would make; None for what only holds one."""
    call, arguments = made.of.rpartition(".")[2], made.arguments
    if call in ("_rebuild_parameter", "_rebuild_parameter_with_state") and arguments:
        inner = arguments[0]
        return _tensor(inner, name, path) if isinstance(inner, Made) else None
    if call == "_rebuild_from_type_v2":
        near = islice(_walk(made), _NEAR)
        inner = next((one for _, one in near if one.of.endswith(("_tensor_v2", "_tensor_v3"))), None)
        if inner is None and len(arguments) > 2 and isinstance(arguments[2], tuple):
            inner = Made(arguments[0], arguments[2]) if isinstance(arguments[0], Global) else None
        return None if inner is None or inner is made else _tensor(inner, name, path)
    if call not in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        return _Found(name, _Storage("", "unknown", 0), 0, (), (), path, f"made by {call[:60]}")
    dtype = str(arguments[6]).removeprefix("torch.") if call.endswith("v3") and len(arguments) > 6 else ""
    storage = _storage(arguments[0], dtype) if arguments else None
    if storage is None or len(arguments) < 4 or not all(map(_sizes, arguments[2:4])):
        return _Found(name, _Storage("", "unknown", 0), 0, (), (), path, "its description is damaged")
    offset, shape, strides = arguments[1:4]
    if type(offset) is not int or not 0 <= offset < 1 << 62 or len(shape) != len(strides):
        return _Found(name, storage, 0, (), (), path, "its description is damaged")
    if storage.dtype not in BY_NAME:
        return _Found(
            name, storage, 0, tuple(shape), (), path, f"dtype {storage.dtype[:40]} has no value per byte"
        )
    if dtype:  # the storage counts bytes
        storage = storage._replace(numel=storage.numel // (BY_NAME[dtype].bits // 8))
    return _Found(name, storage, offset, tuple(shape), tuple(strides), path)


def _sizes(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) <= 64
        and all(type(one) is int and 0 <= one < 1 << 62 for one in value)
    )


def pickled(file: IO[bytes]) -> Any:
    """Return what one pickle describes, such as the metadata of a DCP folder."""
    return load(file, set())
