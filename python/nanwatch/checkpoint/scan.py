"""Scan of checkpoints: the health of each tensor, in one read of the files, by several threads."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from ..numerics._extension import explain_once
from ..numerics.block_fit import BlockFit
from ..numerics.block_formats import BLOCKS_BY_NAME
from ..numerics.fit import FORMATS, would_fit
from ..numerics.formats import BY_NAME, TensorHealth
from ..numerics.partial_health import PartialHealth
from ..util.progress import Tell, silent
from .against import compare
from .encodings import ENCODINGS, scales_of
from .findings import find
from .formats import read_checkpoint
from .result import FormatFit, Scan, TensorScan
from .stored import Contents, DamagedError, OpenFiles, StoredTensor
from .streaming import CHUNK, Streamer, dead_lines, step_of

_TASK = 1 << 26  # bytes that a thread reads in one go
# More only wait for one another: each chunk takes the interpreter lock for some microseconds.
_MOST_THREADS = 16
_GLANCE = 1 << 12  # bytes that tell tensors of the same range apart
_SHOWN = 5  # dead rows whose numbers are kept
_ROWS = 1 << 19  # bytes of the rows that a format is tried on at a time
_MOST_ROW = 1 << 24


def scan(
    *paths: str | PathLike[str],
    against: str | PathLike[str] | None = None,
    to: Sequence[str] = (),
    threads: int | None = None,
    tell: Tell = silent,
) -> Scan:
    """Read all tensors of a checkpoint and return what is wrong with them, without running anything of it.

    `paths`: files of safetensors, torch.save (.pt, .pth, .bin), GGUF or NumPy (.npz, .npy), an index of such files, or
    folders with these or of torch.distributed.checkpoint. Several are one checkpoint. `against`: another checkpoint;
    the result then says which tensors differ and how far. `to`: number formats ("float16", "mxfp8") that each matrix of
    floating point is tried in, which takes another, slower read. `threads`: the default is one a core, at most 16.

    Takes about 60 MiB beside PyTorch's own, whatever the size of the files. Damaged files are problems of the result.
    Raises OSError for a path that is not there, ValueError for one that is no checkpoint and for an unknown format.

    Examples:
        >>> import nanwatch, torch
        >>> from safetensors.torch import save_file
        >>> save_file({"w": torch.tensor([[1.0, torch.nan]])}, "model.safetensors")
        >>> result = nanwatch.scan("model.safetensors")
        >>> result.is_sound, result.tensors[0].health.num_nan
        (False, 1)
    """
    if not paths:
        raise ValueError("scan got no path; pass the file or the folder of a checkpoint")
    for name in to:
        if name not in BLOCKS_BY_NAME and name not in FORMATS:
            raise ValueError(
                f"scan got the format {name!r}; accepted are {', '.join((*FORMATS, *BLOCKS_BY_NAME))}"
            )
    if threads is not None and threads < 1:
        raise ValueError(f"scan got threads={threads!r}; accepted is a number above 0")
    explain_once()
    count = min(threads or len(os.sched_getaffinity(0)), _MOST_THREADS)
    contents = _contents(paths)
    tensors = list(_scanned(contents.tensors, count, tuple(to), tell, fingerprints=against is not None))
    comparison = None
    if against is None:
        # Without another checkpoint a fingerprint only tells those apart that are alike in all else.
        alike = _alike(contents.tensors, tensors)
        again = _scanned([contents.tensors[i] for i in alike], count, (), tell, fingerprints=True)
        for i, one in zip(alike, again, strict=True):
            tensors[i] = replace(tensors[i], fingerprint=one.fingerprint)
    else:
        other = _contents([against])
        others = list(_scanned(other.tensors, count, (), tell, fingerprints=True))
        comparison = compare(
            (contents.tensors, tensors),
            (other.tensors, others),
            [text for _, text in other.problems],
            count,
            tell,
        )
    return Scan(
        tuple(str(path) for path in paths),
        None if against is None else str(against),
        tuple(tensors),
        tuple(find(contents, tensors)),
        comparison,
    )


def _contents(paths: Sequence[str | PathLike[str]]) -> Contents:
    found = Contents()
    for path in paths:
        found.add(read_checkpoint(Path(path)))
    return found


def _alike(stored: Sequence[StoredTensor], tensors: Sequence[TensorScan]) -> list[int]:
    """Return the numbers of the tensors that may be equal to others; of those that are tied only that of the first."""
    groups: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)
    for i, (one, scanned) in enumerate(zip(stored, tensors, strict=True)):
        health = scanned.health
        if one.source is not None and health is not None and health.abs_min != health.abs_max:
            groups[one.dtype, one.shape, str(health)].setdefault(one.source.key, i)
    found: dict[Hashable, list[int]] = defaultdict(list)
    with OpenFiles() as files:
        for key, group in groups.items():
            for i in group.values() if len(group) > 1 else ():
                with suppress(DamagedError, OSError):
                    first = next(Streamer(files, _GLANCE).chunks(stored[i])).raw
                    found[key, first.numpy().tobytes()].append(i)
    return sorted(i for alike in found.values() if len(alike) > 1 for i in alike)


class _Part(NamedTuple):
    """Result of reading a part: `bad_scales` counts those of an encoding that is not decoded."""

    health: PartialHealth
    raw: PartialHealth
    bad_scales: int = 0
    error: str = ""


_Task: TypeAlias = tuple[StoredTensor, int, int]  # and the bytes of it


def _tasks(tensors: Sequence[StoredTensor]) -> Iterator[_Task]:
    """Yield the parts of each tensor that can be read, at least one."""
    for one in tensors:
        if one.lost or one.unread or one.source is None:
            continue
        step = max(one.nbytes, 1)
        if not one.source.in_order:
            step = min(step, _TASK // step_of(one, CHUNK) * step_of(one, CHUNK))
        for begin in range(0, max(one.nbytes, 1), step):
            yield one, begin, min(begin + step, one.nbytes)


def _read(task: _Task, fingerprints: bool) -> _Part:
    tensor, begin, end = task
    found, bad = _Part(PartialHealth(), PartialHealth()), 0
    encoding = ENCODINGS.get(tensor.dtype)
    try:
        with OpenFiles() as files:
            for chunk in Streamer(files).chunks(tensor, begin, end):
                if encoding is not None and fingerprints:
                    found.raw.add(chunk.raw, chunk.raw_start)
                if chunk.values is not None:
                    found.health.add(
                        chunk.values, chunk.start, fingerprints=fingerprints or encoding is not None
                    )
                elif encoding is not None:
                    blocks = chunk.raw.numpy().reshape(-1, encoding.bytes)
                    bad += int((~np.isfinite(scales_of(encoding, blocks))).any(1).sum())
    except (DamagedError, OSError, MemoryError) as error:
        return found._replace(error=str(error)[:200] or type(error).__name__)
    return found._replace(bad_scales=bad)


def _scanned(
    tensors: Sequence[StoredTensor], threads: int, to: tuple[str, ...], tell: Tell, *, fingerprints: bool
) -> Iterator[TensorScan]:
    """Yield the result of each tensor, in their order."""
    total = sum(one.nbytes for one in tensors if not one.lost) >> 20
    done = 0
    pool = ThreadPoolExecutor(threads)
    try:
        # A few tasks ahead: a large checkpoint has thousands.
        source = _tasks(tensors)
        tasks = deque((task, pool.submit(_read, task, fingerprints)) for task in islice(source, 4 * threads))
        for tensor in tensors:
            parts: list[_Part] = []
            while tasks and tasks[0][0][0] is tensor:
                (_, begin, end), future = tasks.popleft()
                parts.append(future.result())
                done += end - begin
                tell(f"reading {tensor.file.name}", done >> 20, total, "MiB")
                tasks.extend((more, pool.submit(_read, more, fingerprints)) for more in islice(source, 1))
            yield _finished(tensor, parts, to, fingerprints=fingerprints)
    finally:
        pool.shutdown(cancel_futures=True)


def _finished(
    tensor: StoredTensor, parts: Sequence[_Part], to: tuple[str, ...], *, fingerprints: bool
) -> TensorScan:
    found = TensorScan(
        tensor.name, str(tensor.file), tensor.dtype, tensor.shape, tensor.nbytes, tensor.unread, tensor.lost
    )
    error = next((one.error for one in parts if one.error), "")
    if error or not parts:
        return replace(found, lost=found.lost or error)
    health, raw = PartialHealth(), PartialHealth()
    for one in parts:
        health.merge(one.health)
        raw.merge(one.raw)
    if (encoding := ENCODINGS.get(tensor.dtype)) is not None:
        if fingerprints:
            found = replace(found, fingerprint=raw.fingerprint("uint8", (tensor.nbytes,)))
        if encoding.decode is None:
            bad = sum(one.bad_scales for one in parts)
            why = f"{tensor.dtype} is not decoded; its scales are read"
            return replace(found, unread=why, bad_blocks=bad)
    elif tensor.order is None and fingerprints:
        found = replace(found, fingerprint=health.fingerprint(tensor.dtype, tensor.shape))
    known = health.health(tensor.lying)
    try:
        rows, columns = dead_lines(tensor, known.num_zero, _SHOWN)
        fits = tuple(_fit(tensor, name) for name in to if _may_be_matrix(tensor))
    except (DamagedError, OSError, MemoryError) as error:  # cut off since
        return replace(found, lost=str(error)[:200] or type(error).__name__)
    return replace(
        found,
        health=_in_order(known, tensor),
        dead_rows=rows.total,
        dead_columns=columns.total,
        first_dead_rows=rows.first,
        first_dead_columns=columns.first,
        fits=fits,
    )


def _in_order(health: TensorHealth, tensor: StoredTensor) -> TensorHealth:
    """Return the health with the first non-finite element by its index in the tensor."""
    first = health.first_nonfinite
    if first is None or tensor.order is None:
        return health
    index = dict(zip(tensor.order, first, strict=True))
    return health._replace(first_nonfinite=tuple(index[d] for d in range(len(first))))


def _may_be_matrix(tensor: StoredTensor) -> bool:
    form = BY_NAME.get(tensor.dtype)
    return len(tensor.shape) > 1 and form is not None and form.has_sign_bit and tensor.order is None


def _fit(tensor: StoredTensor, name: str) -> FormatFit:
    """Try a format on the rows of a matrix, some at a time."""
    width = tensor.shape[-1] * BY_NAME[tensor.dtype].bits // 8
    form = BLOCKS_BY_NAME.get(name)
    by_tensor = form is not None and (form.columns is None) == (form.rows is None) and form.rows is None
    if (by_tensor and tensor.nbytes > _MOST_ROW) or width > _MOST_ROW:
        return FormatFit(name, unread="its blocks are too large to be tried in a part of the tensor")
    rows = form.rows if form is not None and form.rows else 1
    step = tensor.nbytes if by_tensor else max(_ROWS // max(width * rows, 1), 1) * width * rows
    numbers = lost = flushed = 0
    signal = noise = 0.0
    with OpenFiles() as files:
        streamer = Streamer(files)
        for at in range(0, tensor.nbytes, max(step, 1)):
            values = streamer.read(tensor, at, min(step, tensor.nbytes - at)).values
            assert values is not None
            fit = would_fit(values.view(-1, tensor.shape[-1]), name)
            numbers += fit.num_elements
            if isinstance(fit, BlockFit):
                lost, flushed = lost + fit.num_saturated + fit.num_lost, flushed + fit.num_flushed
                signal, noise = signal + fit.signal, noise + fit.noise
            else:
                lost, flushed = lost + fit.num_overflow, flushed + fit.num_underflow
    return FormatFit(name, numbers, lost, flushed, signal if form else None, noise if form else None)
