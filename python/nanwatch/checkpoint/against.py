"""Comparison of two checkpoints: which tensors changed, how far, and whether a conversion was faithful."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf, sqrt
from typing import TypeAlias

import torch
from torch import Tensor

from ..util.progress import Tell
from .encodings import ENCODINGS, bytes_of
from .pairing import Pair, Pairing, tolerance_of
from .result import Change, CheckpointComparison, TensorScan
from .stored import DamagedError, OpenFiles, StoredTensor
from .streaming import Streamer, buffer_of

_ELEMENTS = 1 << 17  # of a step, so that its temporaries stay in the caches
_BAND = 1 << 20  # bytes of rows of a transposed matrix
_LEAST_ROWS = 32

Side: TypeAlias = tuple[Sequence[StoredTensor], Sequence[TensorScan]]


def compare(a: Side, b: Side, problems: Sequence[str], threads: int, tell: Tell) -> CheckpointComparison:
    """Return how the tensors of `b` differ from those of `a`. Each side has them with their scans."""
    tell("matching tensors")
    scans = {id(stored): scanned for side in (a, b) for stored, scanned in zip(*side, strict=True)}
    readable = [[one for one in side[0] if not _why_not(one, scans[id(one)])] for side in (a, b)]
    with OpenFiles() as files:
        pairs = Pairing(readable[0], readable[1], files).match()
    changes: list[Change] = []
    pool = ThreadPoolExecutor(threads)
    try:
        for done, change in enumerate(pool.map(lambda pair: _change(pair, scans), pairs)):
            tell("comparing", done, len(pairs), "tensors")
            changes.append(change)
    finally:
        pool.shutdown(cancel_futures=True)
    matched = {id(one) for pair in pairs for one in (*pair.a, *pair.b)}
    only, only_other = ([one for one in side[0] if id(one) not in matched] for side in (a, b))
    by_name = {one.name: one for one in only_other}
    for one in list(only):
        if (other := by_name.get(one.name)) is not None:
            why = _why_not(one, scans[id(one)]) or _why_not(other, scans[id(other)])
            text = why or f"{list(one.shape)} is no {list(other.shape)}"
            changes.append(Change((one.name,), (other.name,), "not compared", text))
            only.remove(one)
            only_other.remove(other)
    names, others = (tuple(one.name for one in left) for left in (only, only_other))
    return CheckpointComparison(tuple(changes), names, others, tuple(problems))


def _why_not(one: StoredTensor, scanned: TensorScan) -> str:
    return scanned.lost or scanned.unread


@dataclass(slots=True)
class _Distance:
    noise: float = 0.0
    square: float = 0.0
    largest: float = 0.0
    at: int = -1
    unrounded: int = 0  # elements that are not the nearest in the other's format

    def add(self, a: Tensor, b: Tensor, start: int, *, is_exact: bool) -> None:
        """Add elements; `start` is the number of the first one."""
        if is_exact:
            nearest = a.to(b.dtype)
            same = (nearest.float() if b.element_size() == 1 else nearest) == (
                b.float() if b.element_size() == 1 else b
            )
            self.unrounded += int((~(same | (a.isnan() & b.isnan()))).sum() if not bool(same.all()) else 0)
        wide = torch.float32 if max(a.element_size(), b.element_size()) < 4 else torch.float64
        x, y = a.to(wide), b.to(wide)
        apart = y - x
        if not bool(apart.isfinite().all()):
            apart[(x == y) | (x.isnan() & y.isnan())] = 0.0
            x, apart = x.nan_to_num(0.0, 0.0, 0.0), apart.nan_to_num(inf, inf, -inf)
        self.noise += float(apart.square().sum(dtype=torch.float64))
        self.square += float(x.square().sum(dtype=torch.float64))
        largest = float(apart.abs().max()) if len(apart) else 0.0
        if largest > self.largest:
            self.largest, self.at = largest, start + int(apart.abs().argmax())


def _change(pair: Pair, scans: dict[int, TensorScan]) -> Change:
    names, others = tuple(one.name for one in pair.a), tuple(one.name for one in pair.b)
    one, other = pair.a[0], pair.b[0]
    mine, its = scans[id(one)].fingerprint, scans[id(other)].fingerprint
    forms = {(each.dtype, each.shape) for each in (*pair.a, *pair.b)}
    if len(pair.a) == len(pair.b) == 1 == len(forms) and mine == its is not None:
        return Change(names, others, "equal")
    found = _Distance()
    is_exact = not {one.dtype for one in (*pair.a, *pair.b)} & set(ENCODINGS)
    try:
        with OpenFiles() as files:
            if pair.transposed:
                _transposed(one, other, files, found, is_exact=is_exact)
            else:
                _parts(pair, files, found, is_exact=is_exact)
    except (DamagedError, OSError) as error:
        return Change(names, others, "not compared", str(error)[:200])
    relative = sqrt(found.noise / found.square) if found.square else (inf if found.noise else 0.0)
    text = ", ".join(
        ["transposed"] * pair.transposed + ["fused"] * (len(pair.a) < len(pair.b) or len(pair.a) > 1)
    )
    if one.dtype != other.dtype:
        text += f"{', ' * bool(text)}{one.dtype} to {other.dtype}"
    if found.noise == 0 and (one.dtype == other.dtype or not is_exact):
        kind = "equal"
    elif is_exact and found.unrounded == 0:
        kind = "converted"
    elif not is_exact and relative <= tolerance_of(*pair.a, *pair.b):
        kind = "quantized"
    else:
        kind = "changed"
    return Change(names, others, kind, text, relative, found.largest, found.at, sqrt(found.square))


def _parts(pair: Pair, files: OpenFiles, found: _Distance, *, is_exact: bool) -> None:
    """Compare elements in the order of the file, the tensors of each side one after the other."""
    # A streamer each, as a chunk is valid until the next one.
    streamers = Streamer(files, 1 << 10), Streamer(files, 1 << 10)
    at = 0
    starts = [_starts(side) for side in (pair.a, pair.b)]
    total = sum(one.numel for one in pair.a)
    while at < total:
        count, values = _ELEMENTS, []
        for side in starts:
            begin, tensor = next((begin, one) for begin, one in reversed(side) if begin <= at)
            count = min(count, begin + tensor.numel - at)
        for side, streamer in zip(starts, streamers, strict=True):
            begin, tensor = next((begin, one) for begin, one in reversed(side) if begin <= at)
            chunk = streamer.read(tensor, bytes_of(tensor.dtype, at - begin), bytes_of(tensor.dtype, count))
            assert chunk.values is not None
            values.append(chunk.values)
        found.add(values[0], values[1], at, is_exact=is_exact)
        at += count


def _starts(tensors: Sequence[StoredTensor]) -> list[tuple[int, StoredTensor]]:
    starts, at = [], 0
    for one in tensors:
        starts.append((at, one))
        at += one.numel
    return starts


def _transposed(
    one: StoredTensor, other: StoredTensor, files: OpenFiles, found: _Distance, *, is_exact: bool
) -> None:
    """Compare a matrix with one that lies by columns: some rows, with the same part of each row of the other."""
    if not is_exact:
        raise DamagedError("a transposed matrix of an encoding is not compared")
    rows, columns = one.lying
    width, step = bytes_of(one.dtype, columns), bytes_of(other.dtype, 1)
    count = max(min(rows, _BAND // max(width, 1)), _LEAST_ROWS)
    streamers = Streamer(files, 1 << 10), Streamer(files, 1 << 10)
    for row in range(0, rows, count):
        now = min(count, rows - row)
        mine = streamers[0].read(one, row * width, now * width).values
        assert mine is not None
        its = torch.empty((columns, now), dtype=getattr(torch, other.dtype))
        memory = buffer_of(its.view(-1))
        assert other.source is not None
        for column in range(columns):
            other.source.read(
                files, (column * rows + row) * step, memory[column * now * step : (column + 1) * now * step]
            )
        found.add(mine, its.t().reshape(-1), row * columns, is_exact=is_exact)
