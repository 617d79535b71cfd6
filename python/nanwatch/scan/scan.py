"""Scan of checkpoints in threads: what is in each tensor, what is wrong with it, and what differs in another."""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from math import inf, prod, sqrt
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..history.monitor import apart_from_siblings
from ..numerics import _extension
from ..numerics.fit import edges
from ..numerics.formats import BY_NAME, limits
from ..numerics.ranges import block_sums, health_of_parts, healths, sealed, tensor_health
from ..numerics.readable import dtype_name, is_plain, type_name, unreadable
from ..util.messages import Tell, silent, spell, without_wrappers
from .files import Stored, open_checkpoint
from .result import Change, Problem, Scan, TensorScan

PART = 1 << 22  # bytes: a call reads two or three, so that threads rarely wake and memory stays small
_STEP = 1 << 18  # elements of a comparison: its temporaries stay in the caches
_MANY_ZEROS = 0.25  # blocks of 4 bits make up to 17 % of random numbers zero
_SHOWN = 5  # dead rows whose numbers are kept
_MOST_THREADS = 16  # more are no faster, and each has a part in memory
# Relative, of a tensor: rounding to float8_e5m2 takes at most this. A cast that makes everything zero takes more.
_MOST_ROUNDED = 0.125

Member: TypeAlias = tuple[Stored, TensorScan]
_Part: TypeAlias = tuple[Stored, Tensor]
_Row: TypeAlias = tuple[list[float], Tensor]  # of a part: its health, and sums for the fingerprint


def scan(
    *paths: str | PathLike[str],
    against: str | PathLike[str] | None = None,
    tell: Tell = silent,
) -> Scan:
    """Read all tensors of a checkpoint and return what is wrong with them, without running anything of it.

    `paths`: files of safetensors, torch.save (.pt, .pth, .bin), GGUF or NumPy (.npz, .npy), an index of such files, or
    folders with these or of torch.distributed.checkpoint. Several are one checkpoint, the original. `against`: what
    became of it, such as a conversion; the result then says which tensors differ and how far.

    Files are mapped, so that memory does not grow with them, but for whole files of the format before PyTorch 1.6.
    Damaged files are problems of the result. Raises OSError for a path that is not there, ValueError where it is no
    checkpoint, ImportError where the package for a format is missing.

    Examples:
        >>> import nanwatch, torch
        >>> from safetensors.torch import save_file
        >>> save_file({"w": torch.tensor([[1.0, torch.nan]])}, "model.safetensors")
        >>> result = nanwatch.scan("model.safetensors")
        >>> result.is_sound, result.tensors[0].health.num_nan
        (False, 1)
    """
    for path in paths if against is None else (*paths, against):
        if not isinstance(path, str | PathLike):
            raise TypeError(f"scan got the path {type_name(path)}; pass each as a str or a Path of its own")
    if not paths or "" in (*paths, against):
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
        changes = [Change(name, name, "not compared", text) for name, text in lost]
        changes += _changes(members, others, tell)
    tensors = tuple(tensor for _, tensor in members)
    problems += (Problem(*remark, (tensor.name,)) for tensor in tensors for remark in _remarks(tensor))
    problems = sorted([*problems, *_outliers(tensors)], key=lambda problem: not problem.is_fault)
    files = tuple(map(str, paths)), None if against is None else str(against)
    return Scan(*files, tensors, tuple(problems), tuple(changes))


# The values of each tensor.


@torch.inference_mode()  # without autograd a tensor of 1 MiB takes a tenth less
def _read_all(paths: Sequence[Any], tell: Tell, *, fingerprints: bool) -> tuple[list[Member], list[Problem]]:
    entries = [entry for path in paths for entry in open_checkpoint(Path(path))]
    readings: list[_Reading] = []
    with ThreadPoolExecutor(min(torch.get_num_threads(), _MOST_THREADS), initializer=_compute_alone) as pool:
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
    """Let PyTorch use this thread alone. `torch.set_num_threads` would change threads of the program too."""
    # First let PyTorch and the compiled part, which has a copy of that code, set the number of a new thread.
    healths([torch.zeros(1 << 19, dtype=torch.uint8)])
    with suppress(AttributeError):  # a PyTorch without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)


class _Reading:
    """One tensor while it is read: its parts of `step` elements, and the fields of its TensorScan."""

    def __init__(self, stored: Stored) -> None:
        self.stored, self.is_mapped, self.step = stored, False, 0
        self.x: Tensor | None = None
        self.parts: Sequence[Tensor] = ()
        self.facts: dict[str, Any] = {}
        try:
            x = stored.load()
            shape = () if x.is_nested else tuple(x.shape)  # some sizes of a nested tensor are no numbers
            self.facts.update(dtype=dtype_name(x.dtype), shape=shape, unread=unreadable(x))
            if self.facts["unread"]:
                return
            if not is_plain(x):
                self.facts["health"] = tensor_health(x)
                return
            if stored.encoding:
                self.facts.update(dtype=stored.encoding, shape=stored.shape)
                stored.decode(x.reshape(-1)[: stored.block[1]])  # raises where gguf has no decoder
            self.facts["nbytes"], self.x = x.nbytes, x
            self.step = PART // (4 if stored.encoding else x.element_size())
            self.parts = stored.parts(x, self.step)
            self.is_mapped = any(self.parts[0].data_ptr() in region for region in stored.regions)
        except Exception as error:
            # PyTorch does not read the dtype or layout, or a library meets the damage when it loads the tensor.
            kind = "unread" if isinstance(error, TypeError | NotImplementedError) else "lost"
            self.facts[kind] = spell(error)

    def conclude(self, rows: Sequence[_Row], fingerprints: bool) -> None:
        """Put together what was read of the parts, and let go of the tensor."""
        x, self.x, self.parts = self.x, None, ()
        if x is None:
            return
        columns = {number * self.step: row for number, (row, _) in enumerate(rows)}
        health = self.facts["health"] = health_of_parts(columns, self.facts["shape"])
        if fingerprints:
            sums = torch.cat([sums for _, sums in rows])
            self.facts["fingerprint"] = sealed(sums, dtype_name(x.dtype), x.shape)
        has_rows = not self.stored.encoding and x.is_floating_point() and x.dim() > 1
        # With fewer zeros than a row has elements no row is dead.
        if has_rows and 1 < (width := prod(x.shape[1:])) <= health.num_zero:
            dead = _dead_rows(self.stored, x.reshape(-1, width))
            self.facts["dead_rows"], self.facts["first_dead_rows"] = dead


def _read(pool: ThreadPoolExecutor, tell: Tell, fingerprints: bool, readings: Sequence[_Reading]) -> None:
    groups, room = list[list[_Part]](), 0
    for stored, part in ((reading.stored, part) for reading in readings for part in reading.parts):
        if room <= 0:
            groups.append([])
            room = 2 * PART
        groups[-1].append((stored, part))
        # A part that is to be decoded becomes as large as PART, and is read alone.
        room = 0 if stored.encoding else room - part.nbytes
    rows: list[_Row] = []
    for number, group_rows in enumerate(pool.map(partial(_read_group, fingerprints), groups)):
        tell("reading", number, len(groups), "parts")
        rows += group_rows
    rows_left = iter(rows)
    for reading in readings:
        reading.conclude([*islice(rows_left, len(reading.parts))], fingerprints)


@torch.inference_mode()
def _read_group(fingerprints: bool, group: Sequence[_Part]) -> Sequence[_Row]:
    """Read the parts by one call, and give their pages back."""
    columns = healths([stored.decode(part) for stored, part in group])
    rows = [(row, block_sums(x) if fingerprints else x) for row, (_, x) in zip(columns, group, strict=True)]
    for stored in {stored.regions: stored for stored, _ in group}.values():
        stored.release(*(part for _, part in group))
    return rows


def _dead_rows(stored: Stored, rows: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return how many rows are all zero, and the numbers of the first."""
    count, first = 0, list[int]()
    step = max(PART // 8 // rows.shape[1], 1)  # they become float64
    for start in range(0, len(rows), step):
        # PyTorch's `any` refuses formats of 8 bits.
        dead = rows[start : start + step].double().any(1).logical_not_().nonzero().flatten().numpy()
        count += len(dead)
        first += (start + dead[: _SHOWN - len(first)]).tolist()
        # With the first page Linux has mapped pages of the part before again.
        stored.release(rows[max(start - step, 0) : start + step])
    return count, tuple(first)


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
        yield ("mask", False, f"{text}; all others are 0") if is_mask else ("non-finite", True, text)
    if is_mask or not tensor.is_float:
        return
    if num_zero > 1 and num_zero >= _MANY_ZEROS * numel:
        yield "zeros", False, f"{num_zero / numel:.1%} of {numel:,}"
    if 0 < (count := tensor.dead_rows) < tensor.shape[0]:
        listed = ", ".join(map(str, tensor.first_dead_rows)) + (", ..." if count > _SHOWN else "")
        yield "dead", False, f"{count:,} rows are all zero: {listed}"
    ends = limits(tensor.dtype)
    for name in ("float16", "bfloat16"):
        if ends is None or ends.largest <= BY_NAME[name].ends.largest:
            continue
        if largest >= edges(name).overflows_from:
            yield "range", False, f"abs max {largest:.4g} overflows in {name}"
        elif 0 < largest < edges(name).normal_from:
            yield "range", False, f"abs max {largest:.4g}: every element would be subnormal or zero in {name}"


def _outliers(tensors: Sequence[TensorScan]) -> Iterator[Problem]:
    floats = [(tensor.name.rpartition("."), tensor.health) for tensor in tensors if tensor.is_float]
    peaks = {(name[0], name[2]): health.finite_abs_max for name, health in floats if health is not None}
    for factor, (module, label), pattern, siblings in apart_from_siblings(peaks):
        text = (
            f"abs max {peaks[module, label]:.4g} is {factor:.3g} times the median {median(siblings):.4g} of the"
            f" {len(siblings)} other {pattern}.{label}"
        )
        yield Problem("outlier", False, text, (f"{module}.{label}".removeprefix("."),))


# Comparison of two checkpoints.


def _changes(first: Sequence[Member], second: Sequence[Member], tell: Tell) -> Iterator[Change]:
    """Yield how the tensors of `second` differ from those of `first`.

    They are matched by name, and by fingerprint where names differ. Those that have the same, as the random states of
    several ranks in a folder, are matched in their order.
    """
    by_name, by_value = defaultdict[str, deque[Member]](deque), defaultdict[int | None, deque[Member]](deque)
    for member in second:
        by_name[without_wrappers(member[1].name)].append(member)
    named = [by_name[without_wrappers(tensor.name)] for _, tensor in first]
    matches = [members.popleft() if members else None for members in named]
    for member in chain.from_iterable(by_name.values()):
        by_value[_value(member[1])].append(member)
    for number, (member, match) in enumerate(zip(first, matches, strict=True)):
        tell("comparing", number, len(first), "tensors")
        value = _value(member[1])
        if match is None and value is not None and by_value[value]:
            match = by_value[value].popleft()
        yield Change(member[1].name, "", "missing there") if match is None else _change(member, match)
    for _, tensor in chain.from_iterable(by_value.values()):
        yield Change("", tensor.name, "only there")


def _value(tensor: TensorScan) -> int | None:
    """Return the fingerprint where it tells the tensor from others, unlike that of a new norm or bias."""
    health = tensor.health
    return None if health is None or health.abs_min == health.abs_max else tensor.fingerprint


def _change(first: Member, second: Member) -> Change:
    (stored, a), (other, b) = first, second
    why = a.lost or a.unread or b.lost or b.unread
    if a.fingerprint == b.fingerprint is not None:
        return Change(a.name, b.name, "equal")
    if not why and a.shape != b.shape:
        why = f"{list(a.shape)} is no {list(b.shape)}"
    elif not why and a.dtype != b.dtype and not (a.is_float and b.is_float):
        why = f"{a.dtype} is no {b.dtype}"
    try:
        relative, is_cast = (0.0, True) if why else _distance(stored, other)
    except Exception as error:  # cut off since
        why = spell(error)
    if why:
        return Change(a.name, b.name, "not compared", why)
    if a.dtype == b.dtype:
        return Change(a.name, b.name, "changed" if relative else "equal", "", relative)
    kind = "converted" if is_cast and relative <= _MOST_ROUNDED else "changed"
    return Change(a.name, b.name, kind, f"{a.dtype} to {b.dtype}", relative)


def _distance(stored: Stored, other: Stored) -> tuple[float, bool]:
    """Return the relative difference, and whether each element of the narrower format is the nearest to the other's."""
    noise, square, is_cast = 0.0, 0.0, True
    for raw, other_raw in zip(*(side.parts(side.load(), _STEP) for side in (stored, other)), strict=True):
        x, y = stored.decode(raw), other.decode(other_raw)
        is_cast = is_cast and (_equal(x.to(y.dtype), y) or _equal(y.to(x.dtype), x))
        x, y = x.double(), y.double()
        difference = (y - x).masked_fill((x == y) | (x.isnan() & y.isnan()), 0).nan_to_num(inf, inf, -inf)
        noise += float(difference.square().sum())
        square += float(x.nan_to_num(0, 0, 0).square().sum())
        stored.release(raw)
        other.release(other_raw)
    return sqrt(noise / square) if square else (inf if noise else 0.0), is_cast


def _equal(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x.double(), y.double(), rtol=0, atol=0, equal_nan=True)
