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
from ..numerics.formats import BY_NAME, TensorHealth, limits
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
_CASTS = {name: BY_NAME[name].ends for name in ("float16", "bfloat16")}
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
    problems = sorted([*problems, *_problems(tensors)], key=lambda problem: not problem.is_fault)
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
    """One tensor while it is read: what is known of it, and its parts."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.facts: dict[str, Any] = {}  # fields of the TensorScan
        self.parts: list[_Part] = []
        self.rows: dict[int, _Row] = {}  # by the first element of each part
        self.x: Tensor | None = None
        self.is_mapped = False
        try:
            x = stored.load()
            shape = () if x.is_nested else tuple(x.shape)  # some sizes of a nested tensor are no numbers
            self.facts.update(dtype=dtype_name(x.dtype), shape=shape, unread=unreadable(x))
            if stored.encoding is not None:
                self.facts.update(dtype=stored.encoding.name.lower(), shape=stored.shape)
            if not is_plain(x) and not self.facts["unread"]:
                self.facts["health"] = tensor_health(x)
            elif not self.facts["unread"]:
                step = PART // (4 if stored.encoding else x.element_size())
                self.parts = [(self, start, raw) for start, raw in stored.parts(x, step)]
                for *_, raw in self.parts[:1]:
                    stored.decode(raw[: stored.block[1]])  # raises where gguf has no decoder
                    # The parts of a tensor that is not contiguous are a copy.
                    self.is_mapped = any(raw.data_ptr() in region for region in stored.regions)
                self.x = x
        except Exception as error:
            # PyTorch does not read the dtype or layout, or a library meets the damage when it loads the tensor.
            kind = "unread" if isinstance(error, TypeError | NotImplementedError) else "lost"
            self.facts[kind], self.parts = spell(error), []

    def conclude(self, fingerprints: bool) -> None:
        """Put together what the parts have, and let go of the tensor."""
        x, facts, self.x, self.parts = self.x, self.facts, None, []
        if x is None:
            return
        columns = {start: row for start, (row, _) in self.rows.items()}
        facts["nbytes"], facts["health"] = x.nbytes, health_of_parts(columns, facts["shape"])
        if fingerprints:
            sums = torch.cat([_NO_SUMS, *(sums for _, sums in self.rows.values())])
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
    results = pool.map(partial(_read_group, fingerprints=fingerprints), groups)
    for number, (group, rows) in enumerate(zip(groups, results, strict=True)):
        tell("reading", number, len(groups), "parts")
        for (reading, start, _), row in zip(group, rows, strict=True):
            reading.rows[start] = row
    for reading in readings:
        reading.conclude(fingerprints)


@torch.inference_mode()
def _read_group(group: Sequence[_Part], fingerprints: bool) -> list[_Row]:
    """Read the parts by one call, and give their pages back."""
    rows = healths([reading.stored.decode(raw) for reading, _, raw in group])
    sums = [block_sums(raw) if fingerprints else _NO_SUMS for *_, raw in group]
    for stored in {reading.stored.regions: reading.stored for reading, *_ in group}.values():
        stored.release(*(raw for *_, raw in group))
    return [*zip(rows, sums, strict=True)]


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


def _problems(tensors: Sequence[TensorScan]) -> Iterator[Problem]:
    for tensor in tensors:
        names, health = (tensor.name,), tensor.health
        if tensor.lost:
            yield Problem("lost", True, tensor.lost, names)
        if tensor.unread:
            yield Problem("not checked", False, tensor.unread, names)
        if health is None:
            continue
        # A mask of attention has nothing but zeros and -inf.
        is_mask = 0 < health.num_neginf == health.numel - health.num_zero
        if not health.isfinite:
            counts = {"nan": health.num_nan, "inf": health.num_posinf, "-inf": health.num_neginf}
            listed = ", ".join(f"{count:,} {value}" for value, count in counts.items() if count)
            text = f"{listed} of {health.numel:,}, the first at {[*(health.first_nonfinite or ())]}"
            text += "; all others are 0, as in a mask" if is_mask else ""
            yield Problem("mask" if is_mask else "non-finite", not is_mask, text, names)
        if tensor.is_float and not is_mask:
            yield from (Problem(kind, False, text, names) for kind, text in _remarks(tensor, health))
    yield from _outliers(tensors)


def _remarks(tensor: TensorScan, health: TensorHealth) -> Iterator[tuple[str, str]]:
    """Yield what is worth a look in the values of a tensor: the kind of the problem and its text."""
    numel, num_zero, num_subnormal = health.numel, health.num_zero, health.num_subnormal
    if num_zero == numel:
        if numel > 1:
            yield "all zero", f"all {numel:,} elements"
        return
    if num_zero >= (_MANY_ENCODED_ZEROS if tensor.is_encoded else _MANY_ZEROS) * numel:
        yield "zeros", f"{num_zero / numel:.1%} of {numel:,}"
    if count := tensor.dead_rows:
        listed = ", ".join(map(str, tensor.first_dead_rows)) + (", ..." if count > _SHOWN else "")
        yield "dead", f"{count:,} rows are all zero: {listed}"
    if num_subnormal >= _MANY_SUBNORMALS * numel:
        yield "subnormal", f"{num_subnormal / numel:.1%} of {numel:,} are subnormal in {tensor.dtype}"
    ends, largest = limits(tensor.dtype), health.finite_abs_max
    for target, narrow in _CASTS.items():
        if ends is None or ends.largest <= narrow.largest or largest == 0:  # nothing but zeros and nan
            continue
        if largest > narrow.largest and isinf(
            torch.tensor(largest, dtype=torch.float64).to(getattr(torch, target))
        ):
            yield "range", f"abs max {largest:.4g} overflows in {target}"
        elif largest < narrow.smallest_normal:
            yield "range", f"abs max {largest:.4g}: every element would be subnormal or zero in {target}"


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
    by_value = {member[1].fingerprint: name for name, member in by_name.items() if _is_distinct(member[1])}
    for number, (member, match) in enumerate(zip(first, matches, strict=True)):
        tell("comparing", number, len(first), "tensors")
        if match is None and _is_distinct(member[1]):
            match = by_name.pop(by_value.pop(member[1].fingerprint, ("", 0)), None)
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


def _is_distinct(tensor: TensorScan) -> bool:
    """Return whether the values tell the tensor from others, unlike those of a new norm or bias."""
    health = tensor.health
    return tensor.fingerprint is not None and health is not None and health.abs_min != health.abs_max


def _change(first: Member, second: Member) -> Change:
    (_, a), (_, b) = first, second
    if a.fingerprint == b.fingerprint is not None:
        return Change(a.name, b.name, "equal")
    why = a.lost or a.unread or b.lost or b.unread
    if not why and a.shape != b.shape:
        why = f"{list(a.shape)} is no {list(b.shape)}"
    elif not why and not (a.is_float and b.is_float) and a.dtype != b.dtype:
        why = f"{a.dtype} is no {b.dtype}"
    try:
        return Change(a.name, b.name, "not compared", why) if why else _distance(first, second)
    except Exception as error:  # cut off since
        return Change(a.name, b.name, "not compared", spell(error))


def _distance(first: Member, second: Member) -> Change:
    a, b = first[1], second[1]
    noise = square = largest = 0.0
    at, num_lost = -1, 0  # finite elements that are nan or inf in the second
    unrounded = [0, 0]  # elements that are not the nearest in the second's format, and in the first's
    parts = (stored.parts(stored.load(), _STEP) for stored, _ in (first, second))
    for (start, raw), (_, other_raw) in zip(*parts, strict=True):
        x, y = first[0].decode(raw), second[0].decode(other_raw)
        unrounded[0] += _unrounded(x, y)
        unrounded[1] += _unrounded(y, x)
        x, y = x.double(), y.double()
        num_lost += int((x.isfinite() & ~y.isfinite()).sum())
        difference = (y - x).masked_fill((x == y) | (x.isnan() & y.isnan()), 0).nan_to_num(inf, inf, -inf)
        noise += float(difference.square().sum())
        square += float(x.nan_to_num(0, 0, 0).square().sum())
        most, place = torch.max(difference.abs(), 0)
        if float(most) > largest:
            largest, at = float(most), start + int(place)
        first[0].release(raw)
        second[0].release(other_raw)
    relative = sqrt(noise / square) if square else (inf if noise else 0.0)
    remarks = [f"{a.dtype} to {b.dtype}"] if a.dtype != b.dtype else []
    remarks += [f"{num_lost:,} finite elements become nan or inf"] if num_lost else []
    kind = "changed"
    if noise == 0 and a.dtype == b.dtype:
        kind = "equal"
    elif 0 in unrounded and relative <= _MOST_ROUNDED and not (a.is_encoded or b.is_encoded):
        kind = "converted"
    return Change(a.name, b.name, kind, ", ".join(remarks), relative, largest, at)


def _unrounded(a: Tensor, b: Tensor) -> int:
    """Return the number of elements of `b` that are not the nearest to those of `a`."""
    # PyTorch does not compare numbers of 8 bits.
    nearest, actual = (x.float() if x.element_size() == 1 else x for x in (a.to(b.dtype), b))
    return int(((nearest != actual) & ~(nearest.isnan() & actual.isnan())).sum())
