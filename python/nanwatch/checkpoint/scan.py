"""Scan of checkpoints: the health of each tensor, in one read of the files, by several threads."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from ..numerics._extension import explain_once
from ..numerics.formats import TensorHealth
from ..numerics.partial_health import PartialHealth
from ..numerics.readable import type_name
from ..util.progress import Tell, silent
from .against import compare
from .encodings import ENCODINGS
from .findings import TARGETS, find, tried
from .formats import read_checkpoint
from .result import Scan, TensorScan
from .stored import Contents, DamagedError, Deflated, OpenFiles, StoredTensor
from .streaming import CHUNK, NONE, Piece, Streamer, dead_lines, in_threads, step_of
from .zips import wrong_checksums

_TASK = 1 << 26  # bytes that a thread reads in one go
_MOST_THREADS = 16  # memory has no more bandwidth for more
_GLANCE = 1 << 12  # bytes that tell tensors of the same range apart
_SHOWN = 5  # dead rows whose numbers are kept


def scan(
    *paths: str | PathLike[str],
    against: str | PathLike[str] | None = None,
    to: str | Sequence[str] = (),
    checksums: bool = False,
    threads: int | None = None,
    tell: Tell = silent,
) -> Scan:
    """Read all tensors of a checkpoint and return what is wrong with them, without running anything of it.

    `paths`: files of safetensors, torch.save (.pt, .pth, .bin), GGUF or NumPy (.npz, .npy), an index of such files, or
    folders with these or of torch.distributed.checkpoint. Several are one checkpoint. `against`: another checkpoint;
    the result then says which tensors differ and how far. `to`: number formats ("float16", "mxfp8") that each matrix of
    floating point is tried in, which takes another, slower read. `checksums`: check the CRC-32 of each member of the
    archives of torch.save and NumPy too, at some 1.5 GB/s. `threads`: the default is one a core, at most 16.

    Takes about 20 MiB beside PyTorch's own, whatever the size of the files. Damaged files are problems of the result.
    Raises OSError for a path that is not there, ValueError for one that is no checkpoint and for an unknown format.

    Examples:
        >>> import nanwatch, torch
        >>> from safetensors.torch import save_file
        >>> save_file({"w": torch.tensor([[1.0, torch.nan]])}, "model.safetensors")
        >>> result = nanwatch.scan("model.safetensors")
        >>> result.is_sound, result.tensors[0].health.num_nan
        (False, 1)
    """
    for path in (*paths, *(() if against is None else (against,))):
        if not isinstance(path, str | PathLike):
            raise TypeError(f"scan got the path {type_name(path)}; pass each as a str or a Path of its own")
    if not paths or "" in paths or against == "":
        raise ValueError("scan got no path; pass the file or the folder of a checkpoint")
    to = to.split(",") if isinstance(to, str) else to
    for name in to if isinstance(to, Iterable) else (to,):
        if name not in TARGETS:
            raise ValueError(f"scan got the format {name!r}; accepted are {', '.join(TARGETS)}")
    if threads is not None and threads < 1:
        raise ValueError(f"scan got threads={threads!r}; accepted is a number above 0")
    explain_once()
    count = min(threads or len(os.sched_getaffinity(0)), _MOST_THREADS)
    contents = _contents(paths)
    if checksums:
        _check_sums(contents, tell)
    tensors = list(_scanned(contents.tensors, count, tell, fingerprints=against is not None))
    comparison = None
    if against is None:
        # Without another checkpoint a fingerprint only tells those apart that are alike in all else.
        alike = _alike(contents.tensors, tensors)
        again = _scanned([contents.tensors[i] for i in alike], count, tell, fingerprints=True)
        for i, one in zip(alike, again, strict=True):
            tensors[i] = replace(tensors[i], fingerprint=one.fingerprint)
    else:
        other = _contents([against])
        if not other.tensors:
            why = "; ".join(text for _, text in other.problems) or "it has no tensor"
            raise ValueError(f"{against} cannot be compared with: {why}")
        others = list(_scanned(other.tensors, count, tell, fingerprints=True))
        sides = (contents.tensors, tensors), (other.tensors, others)
        comparison = compare(*sides, [text for _, text in other.problems], count, tell)
    findings = list(find(contents, tensors))
    for name in to:
        findings += tried(contents.tensors, tensors, name)
    other_path = None if against is None else str(against)
    return Scan(tuple(map(str, paths)), other_path, tuple(tensors), tuple(findings), comparison)


def _contents(paths: Sequence[str | PathLike[str]]) -> Contents:
    found = Contents()
    for path in paths:
        found.add(read_checkpoint(Path(path)))
    return found


def _check_sums(contents: Contents, tell: Tell) -> None:
    """Add the members of archives whose checksums are wrong to the problems."""
    broken = {path for path, _ in contents.problems}
    for path in dict.fromkeys(one.file for one in contents.tensors):
        if path not in broken:
            tell(f"checking {path.name}")
            contents.problems += [
                (path, f"the CRC-32 of {name[:80]} is wrong") for name in wrong_checksums(path)
            ]


def _alike(stored: Sequence[StoredTensor], tensors: Sequence[TensorScan]) -> list[int]:
    """Return the numbers of the tensors that may be equal to others; of those that are tied only that of the first."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, (one, scanned) in enumerate(zip(stored, tensors, strict=True)):
        health = scanned.health
        if one.source is not None and health is not None and health.abs_min != health.abs_max:
            groups[one.dtype, one.shape, health[2:]].append(i)
    found: dict[Hashable, list[int]] = defaultdict(list)
    with OpenFiles() as files:
        for key, group in groups.items():
            first_of = {stored[i].source: i for i in reversed(group)} if len(group) > 1 else {}
            for source, i in first_of.items() if len(first_of) > 1 else ():
                with suppress(DamagedError, OSError):
                    assert source is not None
                    first = bytearray(min(_GLANCE, stored[i].nbytes))
                    source.read(files, 0, memoryview(first))
                    found[key, bytes(first)].append(i)
    return sorted(i for alike in found.values() if len(alike) > 1 for i in alike)


class _Part(NamedTuple):
    """Result of reading a piece: its health, and in `bits` the fingerprint of its bytes."""

    health: PartialHealth
    bits: PartialHealth
    error: str = ""


def _tasks(tensors: Sequence[StoredTensor]) -> list[list[Piece]]:
    """Return the pieces of all tensors in their order, at least one of each, in tasks of some MiB."""
    tasks: list[list[Piece]] = []
    left = 0
    for one in tensors:
        size = 0 if one.lost or one.unread or one.source is None else one.nbytes
        step = max(size, 1)
        if size > _TASK and not isinstance(one.source, Deflated):
            step = _TASK // step_of(one, CHUNK) * step_of(one, CHUNK)
        for begin in range(0, max(size, 1), step):
            if left <= 0:
                tasks.append([])
                left = _TASK
            tasks[-1].append(Piece(one, begin, min(begin + step, size)))
            left -= step
    return tasks


def _read(task: Sequence[Piece], fingerprints: bool) -> list[tuple[Piece, _Part]]:
    with OpenFiles() as files:
        streamer = Streamer(files)
        return [(piece, _read_piece(streamer, piece, fingerprints)) for piece in task]


def _read_piece(streamer: Streamer, piece: Piece, fingerprints: bool) -> _Part:
    health, bits = PartialHealth(), PartialHealth()
    try:
        for at, raw, values in streamer.chunks(*piece):
            if fingerprints:
                bits.add_bits(raw, at)
            health.add(values, at * values.numel() // len(raw))
    except (DamagedError, OSError, MemoryError) as error:
        return _Part(health, bits, error=_told(error))
    return _Part(health, bits)


def _scanned(
    tensors: Sequence[StoredTensor], threads: int, tell: Tell, *, fingerprints: bool
) -> Iterator[TensorScan]:
    """Yield the result of each tensor, in their order."""

    def pieces() -> Iterator[tuple[Piece, _Part]]:
        done = 0
        for task in in_threads(lambda task: _read(task, fingerprints), tasks, threads):
            done += sum(piece.end - piece.begin for piece, _ in task)
            tell(f"reading {task[-1][0].tensor.file.name}", done >> 20, total, "MiB")
            yield from task

    tasks = _tasks(tensors)
    total = sum(piece.end - piece.begin for task in tasks for piece in task) >> 20
    for _, group in groupby(pieces(), lambda one: id(one[0].tensor)):
        (piece, part), *rest = group
        yield _finished(piece.tensor, reduce(_together, (one for _, one in rest), part), fingerprints)


def _together(a: _Part, b: _Part) -> _Part:
    """Return the result of two pieces of a tensor; that of the first is part of it from now on."""
    a.health.merge(b.health)
    a.bits.merge(b.bits)
    return _Part(a.health, a.bits, a.error or b.error)


def _finished(tensor: StoredTensor, part: _Part, fingerprints: bool) -> TensorScan:
    unread, lost, encoding = tensor.unread, tensor.lost or part.error, ENCODINGS.get(tensor.dtype)
    health, fingerprint, rows, columns = None, None, NONE, NONE
    if not (unread or lost) and tensor.source is not None:
        if fingerprints and encoding is not None:
            fingerprint = part.bits.fingerprint("uint8", (tensor.nbytes,))
        elif fingerprints and tensor.order is None:
            fingerprint = part.bits.fingerprint(tensor.dtype, tensor.shape)
        health = _in_order(part.health.health(tensor.lying), tensor)
        try:
            rows, columns = dead_lines(tensor, health.num_zero, _SHOWN)
        except (DamagedError, OSError, MemoryError) as error:  # cut off since
            health, lost = None, _told(error)
    of_file = tensor.name, str(tensor.file), tensor.dtype, tensor.shape, tensor.nbytes, unread, lost
    dead = rows.total, columns.total, rows.first, columns.first
    return TensorScan(*of_file, health, fingerprint, *dead)


def _told(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__


def _in_order(health: TensorHealth, tensor: StoredTensor) -> TensorHealth:
    """Return the health with the first non-finite element by its index in the tensor."""
    first = health.first_nonfinite
    if first is None or tensor.order is None:
        return health
    index = dict(zip(tensor.order, first, strict=True))
    return health._replace(first_nonfinite=tuple(index[d] for d in range(len(first))))
