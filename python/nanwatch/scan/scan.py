"""Scan of checkpoints in threads: what is in each tensor, what is wrong with it, and what differs in another."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice, pairwise
from math import inf, isinf, prod, sqrt
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..history.monitor import apart_from_siblings
from ..numerics import _extension
from ..numerics._fingerprint import block_sums, sealed
from ..numerics.formats import BY_NAME, limits
from ..numerics.ranges import health_of_parts, healths, tensor_health
from ..numerics.readable import dtype_name, is_plain, type_name, unreadable
from ..util.progress import Tell, silent
from ..util.visible import spell, without_wrappers
from .files import Stored, open_checkpoint
from .result import Change, Problem, Scan, TensorScan

PART = 1 << 22  # bytes: a call reads two or three, so that threads rarely wake and memory stays small
_STEP = 1 << 18  # elements of a comparison: its temporaries stay in the caches
_MANY_ZEROS, _MANY_ENCODED_ZEROS = 0.1, 0.25  # blocks of 4 bits make up to 17 % of random numbers zero
_MANY_SUBNORMALS = 0.01
_SHOWN = 5  # dead rows whose numbers are kept
_CASTS = {dtype: BY_NAME[dtype_name(dtype)].ends for dtype in (torch.float16, torch.bfloat16)}
_MOST_THREADS = 16  # more are no faster, and each has a part in memory
# Relative, of a tensor: rounding to float8_e5m2 takes at most this. A cast that makes everything zero takes more.
_MOST_ROUNDED = 0.125
_NO_SUMS = torch.empty(0, dtype=torch.int64)

Member: TypeAlias = tuple[Stored, TensorScan]
_Row: TypeAlias = tuple[list[float], Tensor]  # of a part: its health, and sums for the fingerprint
_Part: TypeAlias = "tuple[_Reading, int, Tensor]"  # its first element, and the bytes to decode


def scan(
    *paths: str | PathLike[str],
    against: str | PathLike[str] | None = None,
    tell: Tell = silent,
) -> Scan:
    """Read all tensors of a checkpoint and return what is wrong with them, without running anything of it.

    `paths`: files of safetensors, torch.save (.pt, .pth, .bin), GGUF or NumPy (.npz, .npy), an index of such files, or
    folders with these or of torch.distributed.checkpoint. Several are one checkpoint, the original. `against`: what
    became of it, such as a conversion; the result then says which tensors differ and how far.

    Files are mapped, so that memory does not grow with them. What cannot be mapped is loaded: a tensor at a time from
    .npz and torch.distributed.checkpoint, and whole files of the format before PyTorch 1.6. Damaged files are problems
    of the result. Raises OSError for a path that is not there, ValueError where it is no checkpoint,
    ImportError where the package for a format is missing.

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
    _extension.explain_once()
    members, problems = _read_all(paths, tell, fingerprints=against is not None)
    changes: list[Change] = []
    if against is not None:
        others, faults = _read_all([against], tell, fingerprints=True)
        if not others:
            why = "; ".join(fault.text for fault in faults) or "it has no tensor"
            raise ValueError(f"{against} cannot be compared with: {why}")
        lost = [(name, fault.text) for fault in faults for name in fault.tensors or (str(against),)]
        changes += (Change(name, name, "not compared", text) for name, text in lost)
        changes += _changes(members, others, tell)
    tensors = tuple(tensor for _, tensor in members)
    problems += (Problem(*remark, (tensor.name,)) for tensor in tensors for remark in _remarks(tensor))
    problems = sorted([*problems, *_outliers(tensors)], key=lambda problem: not problem.is_fault)
    files = tuple(map(str, paths)), None if against is None else str(against)
    return Scan(*files, tensors, tuple(problems), tuple(changes))


# The values of each tensor.


@torch.inference_mode()  # without autograd a tensor of 1 MiB takes a tenth less
def _read_all(
    paths: Sequence[str | PathLike[str]], tell: Tell, *, fingerprints: bool
) -> tuple[list[Member], list[Problem]]:
    entries = [entry for path in paths for entry in open_checkpoint(Path(path))]
    readings: list[_Reading] = []
    num_threads = min(torch.get_num_threads(), _MOST_THREADS)
    with ThreadPoolExecutor(num_threads, "nanwatch-scan", _compute_alone) as pool:
        # No thread reads meanwhile: it would wake when a call of PyTorch here lets go of the interpreter, as most do.
        for number, entry in enumerate(entries):
            if isinstance(entry, Stored):
                readings.append(reading := _Reading(entry))
                if not reading.is_mapped:  # one at a time is in memory
                    tell("reading", number, len(entries), "tensors")
                    _read(pool, silent, fingerprints, [reading])
        _read(pool, tell, fingerprints, [reading for reading in readings if reading.is_mapped])
    members = [(x.stored, TensorScan(x.stored.name, str(x.stored.file), **x.facts)) for x in readings]
    return members, [entry for entry in entries if isinstance(entry, Problem)]


def _compute_alone() -> None:
    """Let PyTorch use this thread alone for what it calls: the others read other tensors.

    `torch.set_num_threads` would change the number for threads of the program too.
    """
    # First let PyTorch and the compiled part, which has a copy of that code, set the number of a new thread.
    healths([torch.zeros(1 << 19, dtype=torch.uint8)])
    with suppress(AttributeError):  # a PyTorch without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)


class _Reading:
    """One tensor while it is read: the fields of its TensorScan, its parts, and by their first elements their rows."""

    def __init__(self, stored: Stored) -> None:
        self.stored, self.is_mapped = stored, False
        self.facts: dict[str, Any] = {}
        self.parts: list[_Part] = []
        self.rows: dict[int, _Row] = {}
        self.x: Tensor | None = None
        try:
            x = stored.load()
            shape = () if x.is_nested else tuple(x.shape)  # some sizes of a nested tensor are no numbers
            self.facts.update(dtype=dtype_name(x.dtype), shape=shape, unread=unreadable(x))
            if self.facts["unread"]:
                return
            if not is_plain(x):
                self.facts["health"] = tensor_health(x)
                return
            step = PART // (4 if stored.encoding else x.element_size())
            parts = [(self, start, raw) for start, raw in stored.parts(x, step)]
            if stored.encoding is not None:
                self.facts.update(dtype=stored.encoding.name.lower(), shape=stored.shape)
                stored.decode(x.reshape(-1)[: stored.block[1]])  # raises where gguf has no decoder
            address = parts[0][2].data_ptr() if parts else 0  # the parts of a transposed tensor are a copy
            self.is_mapped = any(address in region for region in stored.regions)
            self.x, self.parts = x, parts
        except Exception as error:
            # PyTorch does not read the dtype or layout, or a library meets the damage when it loads the tensor.
            kind = "unread" if isinstance(error, TypeError | NotImplementedError) else "lost"
            self.facts[kind] = spell(error)

    def conclude(self, fingerprints: bool) -> None:
        """Put together what the parts have, and let go of the tensor."""
        x, facts, parts, self.x, self.parts = self.x, self.facts, self.parts, None, []
        if x is None:
            return
        columns = {start: self.rows[start][0] for _, start, _ in parts}
        facts["nbytes"], facts["health"] = x.nbytes, health_of_parts(columns, facts["shape"])
        if fingerprints:
            sums = torch.cat([_NO_SUMS, *(self.rows[start][1] for _, start, _ in parts)])
            facts["fingerprint"] = sealed(sums, dtype_name(x.dtype), x.shape)
        has_rows = self.stored.encoding is None and x.is_floating_point() and x.dim() > 1
        # With fewer zeros than a row has elements no row is dead.
        if has_rows and 1 < (width := prod(x.shape[1:])) <= facts["health"].num_zero:
            facts["dead_rows"], facts["first_dead_rows"] = _dead_rows(self.stored, x, width)


def _read(pool: ThreadPoolExecutor, tell: Tell, fingerprints: bool, readings: Sequence[_Reading]) -> None:
    groups, room = list[list[_Part]](), 0
    for part in (part for reading in readings for part in reading.parts):
        if room <= 0:
            groups.append([])
            room = 2 * PART
        groups[-1].append(part)
        # A part that is to be decoded becomes as large as PART, and is read alone.
        room = 0 if part[0].stored.encoding else room - part[2].nbytes
    for number, _ in enumerate(pool.map(partial(_read_group, fingerprints=fingerprints), groups)):
        tell("reading", number, len(groups), "parts")
    for reading in readings:
        reading.conclude(fingerprints)


@torch.inference_mode()
def _read_group(group: Sequence[_Part], fingerprints: bool) -> None:
    """Read the parts by one call, and give their pages back."""
    rows = healths([reading.stored.decode(raw) for reading, _, raw in group])
    for (reading, start, raw), row in zip(group, rows, strict=True):
        reading.rows[start] = row, block_sums(raw) if fingerprints else _NO_SUMS
    for stored in {reading.stored.regions: reading.stored for reading, *_ in group}.values():
        stored.release(*(raw for *_, raw in group))


def _dead_rows(stored: Stored, x: Tensor, width: int) -> tuple[int, tuple[int, ...]]:
    """Return how many rows of this width are all zero, and the numbers of the first."""
    # One tensor for all rows: small results between the temporaries of `any` would keep their memory from the next.
    live = torch.zeros(x.numel() // width, dtype=torch.bool)
    parts = stored.parts(x, max((1 << 20) // width, 1) * width)
    for (_, before), (start, raw) in pairwise([(0, x[:0]), *parts]):
        values = raw.float() if raw.element_size() == 1 else raw  # `any` refuses formats of 8 bits
        live[start // width :][: len(values) // width] = values.view(-1, width).any(1)
        stored.release(before, raw)  # with the first page Linux has mapped pages of the part before again
    num_dead = len(live) - int(live.count_nonzero())
    dead = (number for number, is_live in enumerate(live.numpy()) if not is_live)
    return num_dead, tuple(islice(dead, min(num_dead, _SHOWN)))


# Search for problems in the tensors.


def _remarks(tensor: TensorScan) -> Iterator[tuple[str, bool, str]]:
    """Yield what is wrong with a tensor or worth a look: the kind of the Problem, whether it is a fault, its text."""
    if tensor.lost:
        yield "lost", True, tensor.lost
    if tensor.unread:
        yield "not checked", False, tensor.unread
    if (health := tensor.health) is None:
        return
    numel, num_zero, largest = health.numel, health.num_zero, health.finite_abs_max
    # A mask of attention has nothing but zeros and -inf.
    is_mask = 0 < health.num_neginf == numel - num_zero
    if not health.isfinite:
        counts = {"nan": health.num_nan, "inf": health.num_posinf, "-inf": health.num_neginf}
        text = ", ".join(f"{count:,} {value}" for value, count in counts.items() if count)
        text += f" of {numel:,}, the first at {[*(health.first_nonfinite or ())]}"
        text += "; all others are 0, as in a mask" if is_mask else ""
        yield "mask" if is_mask else "non-finite", not is_mask, text
    if tensor.is_float and num_zero == numel > 1:
        yield "all zero", False, f"all {numel:,} elements"
    if is_mask or not tensor.is_float or num_zero == numel:
        return
    if num_zero >= (_MANY_ENCODED_ZEROS if tensor.is_encoded else _MANY_ZEROS) * numel:
        yield "zeros", False, f"{num_zero / numel:.1%} of {numel:,}"
    if count := tensor.dead_rows:
        listed = ", ".join(map(str, tensor.first_dead_rows)) + (", ..." if count > _SHOWN else "")
        yield "dead", False, f"{count:,} rows are all zero: {listed}"
    if health.num_subnormal >= _MANY_SUBNORMALS * numel:
        share = f"{health.num_subnormal / numel:.1%}"
        yield "subnormal", False, f"{share} of {numel:,} are subnormal in {tensor.dtype}"
    ends = limits(tensor.dtype)
    for dtype, narrow in _CASTS.items():
        if ends is None or ends.largest <= narrow.largest or largest == 0:  # nothing but zeros and nan
            continue
        target = dtype_name(dtype)
        if largest > narrow.largest and isinf(torch.tensor(largest, dtype=torch.float64).to(dtype)):
            yield "range", False, f"abs max {largest:.4g} overflows in {target}"
        elif largest < narrow.smallest_normal:
            text = f"abs max {largest:.4g}: every element would be subnormal or zero in {target}"
            yield "range", False, text


def _outliers(tensors: Sequence[TensorScan]) -> Iterator[Problem]:
    floats = [(tensor.name.rpartition("."), tensor.health) for tensor in tensors if tensor.is_float]
    peaks = {(name[0], name[2]): health.finite_abs_max for name, health in floats if health is not None}
    for factor, (module, label), pattern, siblings in apart_from_siblings(peaks):
        text = (
            f"abs max {peaks[module, label]:.4g} is {factor:.3g} times the median {median(siblings):.4g} of the"
            f" {len(siblings)} other {pattern}.{label}"
        )
        yield Problem("outlier", False, text, (f"{module}.{label}" if module else label,))


# Comparison of two checkpoints.


def _changes(first: Sequence[Member], second: Sequence[Member], tell: Tell) -> Iterator[Change]:
    """Yield how the tensors of `second` differ from those of `first`.

    They are matched by name, and by fingerprint where names differ.
    """
    by_name = dict(zip(_names(second), second, strict=True))
    matches = [by_name.pop(name, None) for name in _names(first)]
    by_value = {_value(tensor): name for name, (_, tensor) in by_name.items()}
    for number, (member, match) in enumerate(zip(first, matches, strict=True)):
        tell("comparing", number, len(first), "tensors")
        if match is None and (value := _value(member[1])) is not None:
            match = by_name.pop(by_value.pop(value, ("", 0)), None)
        yield Change(member[1].name, "", "missing there") if match is None else _change(member, match)
    for _, tensor in by_name.values():
        yield Change("", tensor.name, "only there")


def _names(members: Sequence[Member]) -> Iterator[tuple[str, int]]:
    """Yield each name and how often it came before, as in a folder with the random states of several ranks."""
    counts = Counter[str]()
    for _, tensor in members:
        name = without_wrappers(tensor.name)
        yield name, counts[name]
        counts[name] += 1


def _value(tensor: TensorScan) -> int | None:
    """Return the fingerprint where it tells the tensor from others, unlike that of a new norm or bias."""
    health = tensor.health
    return None if health is None or health.abs_min == health.abs_max else tensor.fingerprint


def _change(first: Member, second: Member) -> Change:
    (_, a), (_, b) = first, second
    if a.fingerprint == b.fingerprint is not None:
        return Change(a.name, b.name, "equal")
    why = a.lost or a.unread or b.lost or b.unread
    if not why and a.shape != b.shape:
        why = f"{list(a.shape)} is no {list(b.shape)}"
    elif not why and a.dtype != b.dtype and not (a.is_float and b.is_float):
        why = f"{a.dtype} is no {b.dtype}"
    try:
        return Change(a.name, b.name, "not compared", why) if why else _distance(first, second)
    except Exception as error:  # cut off since
        return Change(a.name, b.name, "not compared", spell(error))


def _distance(first: Member, second: Member) -> Change:
    (stored, a), (other, b) = first, second
    noise = square = largest = 0.0
    at, num_lost = -1, 0  # finite elements that are nan or inf in the second
    unrounded = [0, 0]  # elements that are not the nearest in the second's format, and in the first's
    parts = (member.parts(member.load(), _STEP) for member in (stored, other))
    for (start, raw), (_, other_raw) in zip(*parts, strict=True):
        x, y = stored.decode(raw), other.decode(other_raw)
        unrounded = [unrounded[0] + _unrounded(x, y), unrounded[1] + _unrounded(y, x)]
        x, y = x.double(), y.double()
        num_lost += int((x.isfinite() & ~y.isfinite()).sum())
        difference = (y - x).masked_fill((x == y) | (x.isnan() & y.isnan()), 0).nan_to_num(inf, inf, -inf)
        noise += float(difference.square().sum())
        square += float(x.nan_to_num(0, 0, 0).square().sum())
        most, place = torch.max(difference.abs(), 0)
        if float(most) > largest:
            largest, at = float(most), start + int(place)
        stored.release(raw)
        other.release(other_raw)
    relative = sqrt(noise / square) if square else (inf if noise else 0.0)
    remarks = [f"{a.dtype} to {b.dtype}"] if a.dtype != b.dtype else []
    remarks += [f"{num_lost:,} finite elements become nan or inf"] if num_lost else []
    is_rounded = 0 in unrounded and relative <= _MOST_ROUNDED and not (a.is_encoded or b.is_encoded)
    kind = "equal" if noise == 0 and a.dtype == b.dtype else "converted" if is_rounded else "changed"
    return Change(a.name, b.name, kind, ", ".join(remarks), relative, largest, at)


def _unrounded(a: Tensor, b: Tensor) -> int:
    """Return the number of elements of `b` that are not the nearest to those of `a`."""
    # PyTorch does not compare numbers of 8 bits.
    nearest, actual = (x.float() if x.element_size() == 1 else x for x in (a.to(b.dtype), b))
    return int(((nearest != actual) & ~(nearest.isnan() & actual.isnan())).sum())
