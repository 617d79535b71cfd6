"""Scan of checkpoints in threads: what is in each tensor, what is wrong with it, and what differs in another."""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice, permutations
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
from ..numerics.formats import BY_NAME, TensorHealth, limits
from ..numerics.ranges import block_sums, health_of_parts, healths, sealed, tensor_health
from ..numerics.readable import dtype_name, is_plain, unreadable
from ..records.fields import plain
from ..util.messages import Tell, plural, silent, spell, visible, without_wrappers
from .files import Problem, Stored, libc, open_checkpoint

SCHEMA, VERSION = "nanwatch.scan", 6
PART = 1 << 22  # bytes: a call reads two or three, so that threads rarely wake and memory stays small
_STEP = 1 << 18  # elements of a comparison: its temporaries stay in the caches
_MANY_ZEROS = 0.25  # blocks of 4 bits make up to 17 % of random numbers zero
_SHOWN = 5  # dead rows whose numbers are kept
_MOST_LINES = 10  # of one kind in the text
_MOST_THREADS = 16  # more are no faster, and each has a part in memory
_NARROW = {name: BY_NAME[name].ends for name in ("float16", "bfloat16")}
# Relative difference that rounding to float8_e5m2 makes. A cast that makes all elements zero makes more.
_MOST_ROUNDED = 0.125


@dataclass(slots=True)
class TensorScan:
    """One tensor. `unread` says why its values are not checked, `lost` why they are not all in the file.

    `dtype` is the name of a number format, or of an encoding of GGUF ("q8_0"). With `against`, `fingerprint` is
    `nanwatch.fingerprint` of the tensor, of an encoded one that of its bytes.
    """

    name: str
    file: str
    dtype: str = "unknown"
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    unread: str = ""
    lost: str = ""
    health: TensorHealth | None = None
    fingerprint: int | None = None
    dead_rows: int = 0
    first_dead_rows: tuple[int, ...] = ()

    @property
    def is_float(self) -> bool:
        """Whether its values were read and are numbers of floating point with a sign, also as blocks of GGUF."""
        return self.health is not None and (self.dtype not in BY_NAME or BY_NAME[self.dtype].has_sign_bit)


@dataclass(frozen=True, slots=True)
class Change:
    """Tensor of two checkpoints: its name in the original, and in the other; "" where it has none.

    `kind` is "equal" (to the bit), "converted" (each element is the nearest in the narrower format), "changed",
    "missing there", "only there", or "not compared" with the reason in `text`. `relative` is the norm of the difference
    by that of the original.
    """

    name: str
    other: str
    kind: str
    text: str = ""
    relative: float = 0.0

    def __str__(self) -> str:
        names = " -> ".join(dict.fromkeys(name for name in (self.name, self.other) if name))
        text = f" ({self.text})" if self.text else ""
        return f"{self.relative:>9.3g} {self.kind:>13}  {names}{text}"


@dataclass(frozen=True, slots=True, repr=False)
class Scan:
    """Result of `nanwatch.scan`: `changes` are from the checkpoint in `paths`, the original, to `against`."""

    paths: tuple[str, ...]
    against: str | None
    tensors: tuple[TensorScan, ...]
    problems: tuple[Problem, ...]
    changes: tuple[Change, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether all files are whole and no value is nan or inf, but for those of masks."""
        return not any(problem.is_fault for problem in self.problems)

    @property
    def is_checked(self) -> bool:
        """Whether the values of any tensor were read."""
        return any(tensor.health is not None for tensor in self.tensors)

    @property
    def is_faithful(self) -> bool:
        """Whether the checkpoint `against` has all tensors, equal or as exact as its formats allow."""
        return all(change.kind in ("equal", "converted") for change in self.changes)

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        head = {"schema": SCHEMA, "version": VERSION, "is_sound": self.is_sound}
        faithful = {} if self.against is None else {"is_faithful": self.is_faithful}
        return json.dumps({**head, **faithful, **plain(self)}, allow_nan=False, indent=2)

    def to_text(self) -> str:
        """Return the result for people."""
        num_faults = sum(problem.is_fault for problem in self.problems)
        verdict = "sound" if self.is_checked else "nothing was checked"
        verdict = plural(num_faults, "fault") if num_faults else verdict
        size = sum(tensor.nbytes for tensor in self.tensors) / 1e6
        dtypes = Counter(tensor.dtype for tensor in self.tensors).most_common()
        listed = f" ({', '.join(f'{dtype} {count:,}' for dtype, count in dtypes)})" if dtypes else ""
        paths = ", ".join(self.paths)
        lines = [f"{paths}: {verdict}", f"{len(self.tensors):,} tensors, {size:,.2f} MB{listed}"]
        lines += _section("Faults:", self.problems[:num_faults])
        lines += _section("Worth a look:", self.problems[num_faults:])
        if self.against is not None:
            counts = Counter(change.kind for change in self.changes).items()
            listed = ", ".join(f"{count:,} {kind}" for kind, count in counts) or "nothing to compare"
            lines += ["", f"Original: {paths}. What became of it: {self.against}."]
            lines += [f"{'Faithful' if self.is_faithful else 'Not the same'}: {listed}"]
            rows = sorted(filter(_is_listed, self.changes), key=lambda change: -change.relative)
            lines += _section(f"{'relative':>11} {'':>13}  tensor", rows)
        return "\n".join(map(visible, lines))

    __repr__ = to_text


def _is_listed(change: Change) -> bool:
    return change.kind != "equal" or without_wrappers(change.name) != without_wrappers(change.other)


def _section(title: str, rows: Sequence[Problem | Change]) -> Iterator[str]:
    """Yield the title and the first rows of each kind, nothing where there are no rows."""
    if rows:
        yield from ("", title)
    for kind in dict.fromkeys(row.kind for row in rows):
        texts = [str(row) for row in rows if row.kind == kind]
        yield from (f"  {text}" for text in texts[:_MOST_LINES])
        if (left := len(texts) - _MOST_LINES) > 0:
            yield f"    and {left:,} more (--json has them all)"


def scan(
    *paths: str | PathLike[str], against: str | PathLike[str] | None = None, tell: Tell = silent
) -> Scan:
    """Read all tensors of a checkpoint and return what is wrong with them, without running anything of it.

    `paths`: files of safetensors, torch.save (.pt, .pth, .bin), GGUF or NumPy (.npz, .npy), an index of such files, or
    folders with these or of torch.distributed.checkpoint. Several are one checkpoint, the original. `against`: what
    became of it, such as a conversion; the result then says which tensors differ and how far.

    Files are mapped, but for those of before PyTorch 1.6. Raises OSError for a path that is not there, ValueError where
    it is no checkpoint, ImportError where the package for a format is missing. Damage is a problem of the result.

    Examples:
        >>> import nanwatch, torch
        >>> from safetensors.torch import save_file
        >>> save_file({"w": torch.tensor([[1.0, torch.nan]])}, "model.safetensors")
        >>> result = nanwatch.scan("model.safetensors")
        >>> result.is_sound, result.tensors[0].health.num_nan
        (False, 1)
    """
    if not paths or "" in (*paths, against):
        raise ValueError("scan got no path; pass the file or the folder of a checkpoint")
    _extension.explain_once()
    members, problems = _read_all(paths, tell, fingerprints=against is not None)
    changes: list[Change] = []
    if against is not None:
        others, faults = _read_all([against], tell, fingerprints=True)
        for fault in faults:
            changes += [Change(x, x, "not compared", fault.text) for x in fault.tensors or (str(against),)]
        changes += _changes(members, others, tell)
    tensors = tuple(tensor for _, tensor in members)
    problems += (Problem(*remark, (tensor.name,)) for tensor in tensors for remark in _remarks(tensor))
    problems = sorted([*problems, *_outliers(tensors)], key=lambda problem: not problem.is_fault)
    files = tuple(map(str, paths)), None if against is None else str(against)
    return Scan(*files, tensors, tuple(problems), tuple(changes))


_Member: TypeAlias = tuple[Stored, TensorScan]
_Part: TypeAlias = tuple[Stored, Tensor]
_Loaded: TypeAlias = tuple[Stored, TensorScan, Tensor, int, Sequence[Tensor]]  # parts of so many elements


@torch.inference_mode()  # without autograd a tensor of 1 MiB takes a tenth less
def _read_all(paths: Sequence[Any], tell: Tell, *, fingerprints: bool) -> tuple[list[_Member], list[Problem]]:
    entries = [entry for path in paths for entry in open_checkpoint(Path(path))]
    members = [(x, TensorScan(x.name, str(x.file))) for x in entries if isinstance(x, Stored)]
    loaded: list[_Loaded] = []
    with ThreadPoolExecutor(min(torch.get_num_threads(), _MOST_THREADS), initializer=_compute_alone) as pool:
        # No thread reads meanwhile: it would wake when a call of PyTorch here lets go of the interpreter, as most do.
        for number, (stored, tensor) in enumerate(members):
            loaded += _load(stored, tensor)
            if loaded and not any(loaded[-1][-1][0].data_ptr() in region for region in stored.regions):
                tell("reading", number, len(members), "tensors")
                _read(pool, silent, fingerprints, [loaded.pop()])  # one at a time is in memory
        _read(pool, tell, fingerprints, loaded)
    return members, [entry for entry in entries if isinstance(entry, Problem)]


def _compute_alone() -> None:
    """Let PyTorch use this thread alone. `torch.set_num_threads` would change threads of the program too."""
    # First let PyTorch and the compiled part, which has a copy of that code, set the number of a new thread.
    healths([torch.zeros(1 << 19, dtype=torch.uint8)])
    if hasattr(libc, "omp_set_num_threads"):  # not in a PyTorch without OpenMP
        libc.omp_set_num_threads(1)


def _load(stored: Stored, tensor: TensorScan) -> list[_Loaded]:
    """Load a tensor and note its form. Return it where its parts are to be read."""
    try:
        x = stored.load()
        tensor.dtype, tensor.unread = dtype_name(x.dtype), unreadable(x)
        tensor.shape = () if x.is_nested else tuple(x.shape)  # some sizes of a nested tensor are no numbers
        if not tensor.unread and is_plain(x):
            if stored.encoding is not None:
                tensor.dtype, tensor.shape = stored.encoding.name.lower(), stored.shape
                stored.decode(x.view(-1, x.shape[-1])[0])  # raises where gguf has no decoder
            tensor.nbytes = x.nbytes
            step = PART // (x.element_size() if stored.encoding is None else 4)  # gguf decodes to float32
            return [(stored, tensor, x, step, stored.parts(x, step))]
        tensor.health = None if tensor.unread else tensor_health(x)
    except Exception as error:  # a dtype or layout that NumPy or PyTorch does not read, or damage
        is_unread = isinstance(error, TypeError | NotImplementedError) or "allow_pickle" in str(error)
        tensor.unread, tensor.lost = (spell(error), "") if is_unread else ("", spell(error))
    return []


def _read(pool: ThreadPoolExecutor, tell: Tell, fingerprints: bool, loaded: Sequence[_Loaded]) -> None:
    """Read all parts in the threads, and put together what is known of each tensor."""
    groups, size = defaultdict[int, list[_Part]](list), 0
    for stored, part in ((stored, part) for stored, *_, parts in loaded for part in parts):
        groups[size // (2 * PART)].append((stored, part))
        # A part that is to be decoded becomes as large as PART, and is read alone.
        size += part.nbytes if stored.encoding is None else 2 * PART
    rows: list[tuple[list[float], Tensor]] = []
    for number, group_rows in enumerate(pool.map(partial(_read_group, fingerprints), groups.values())):
        tell("reading", number, len(groups), "parts")
        rows += group_rows
    rows_left = iter(rows)
    for stored, tensor, x, step, parts in loaded:
        columns, sums = zip(*islice(rows_left, len(parts)), strict=True)
        tensor.health = health_of_parts({n * step: row for n, row in enumerate(columns)}, tensor.shape)
        if fingerprints:
            tensor.fingerprint = sealed(torch.cat(sums), dtype_name(x.dtype), x.shape)
        # With fewer zeros than a row has elements no row is dead.
        if (zeros := tensor.health.num_zero) and x.is_floating_point() and 1 < prod(x.shape[1:]) <= zeros:
            _find_dead_rows(stored, tensor, x.reshape(len(x), -1))


@torch.inference_mode()
def _read_group(fingerprints: bool, group: Sequence[_Part]) -> list[tuple[list[float], Tensor]]:
    """Return the health of each part, read by one call, and its sums for the fingerprint. Give the pages back."""
    columns = healths([stored.decode(part) for stored, part in group])
    rows = [(row, block_sums(x) if fingerprints else x) for row, (_, x) in zip(columns, group, strict=True)]
    for stored in {stored.file: stored for stored, _ in group}.values():
        stored.release(*(part for _, part in group))
    return rows


def _find_dead_rows(stored: Stored, tensor: TensorScan, rows: Tensor) -> None:
    """Count the rows that are all zero, and note the first."""
    step = max(PART // 8 // rows.shape[1], 1)  # they become float64, as `any` refuses formats of 8 bits
    for start in range(0, len(rows), step):
        dead = rows[start : start + step].double().any(1).logical_not_().nonzero().flatten().numpy()
        tensor.dead_rows += len(dead)
        tensor.first_dead_rows += tuple((start + dead[: _SHOWN - len(tensor.first_dead_rows)]).tolist())
        # With the first page Linux has mapped pages of the part before again.
        stored.release(rows[max(start - step, 0) : start + step])


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
    for name in [name for name, narrow in _NARROW.items() if ends and ends.largest > narrow.largest]:
        if largest >= edges(name).overflows_from:
            yield "range", False, f"abs max {largest:.4g} overflows in {name}"
        elif 0 < largest < edges(name).normal_from:
            yield "range", False, f"abs max {largest:.4g}: every element would be subnormal or zero in {name}"


def _outliers(tensors: Sequence[TensorScan]) -> Iterator[Problem]:
    floats = [(tensor.name.rpartition("."), tensor.health) for tensor in tensors if tensor.is_float]
    peaks = {(name[0], name[2]): health.finite_abs_max for name, health in floats if health is not None}
    for factor, (module, label), pattern, siblings in apart_from_siblings(peaks):
        peak, middle = peaks[module, label], median(siblings)
        # The factor is that of the median, or of 0.1 where the median is smaller.
        text = f"abs max {peak:.4g} is {factor:.3g} times {peak / factor:.4g}; "
        text += f"the {len(siblings)} other {pattern}.{label} have a median of {middle:.4g}"
        yield Problem("outlier", False, text, (f"{module}.{label}".removeprefix("."),))


def _changes(first: Sequence[_Member], second: Sequence[_Member], tell: Tell) -> Iterator[Change]:
    """Yield how `second` differs from `first`. Tensors are matched by name, else by fingerprint, in their order."""
    left, matches = dict(enumerate(second)), dict[int, _Member]()

    def value(tensor: TensorScan) -> int | None:  # all new norms and biases are alike
        health = tensor.health
        return None if health is None or health.abs_min == health.abs_max else tensor.fingerprint

    for key in (lambda tensor: without_wrappers(tensor.name), value):
        places = defaultdict[Any, deque[int]](deque)
        for place, (_, tensor) in left.items():
            places[key(tensor)].append(place)
        for number, (_, tensor) in enumerate(first):
            if number not in matches and key(tensor) is not None and places[key(tensor)]:
                matches[number] = left.pop(places[key(tensor)].popleft())
    for number, member in enumerate(first):
        tell("comparing", number, len(first), "tensors")
        match = matches.get(number)
        yield Change(member[1].name, "", "missing there") if match is None else _change(member, match)
    yield from (Change("", tensor.name, "only there") for _, tensor in left.values())


def _change(first: _Member, second: _Member) -> Change:
    (stored, a), (other, b) = first, second
    if a.fingerprint == b.fingerprint is not None:
        return Change(a.name, b.name, "equal")
    kind, text, relative = "not compared", a.lost or a.unread or b.lost or b.unread, 0.0
    if not text and a.shape != b.shape:
        text = f"{list(a.shape)} is no {list(b.shape)}"
    elif not text and a.dtype != b.dtype and not (a.is_float and b.is_float):
        text = f"{a.dtype} is no {b.dtype}"
    elif not text:
        try:
            relative, is_cast = _distance(stored, other)
            same, text = ("equal", "") if a.dtype == b.dtype else ("converted", f"{a.dtype} to {b.dtype}")
            kind = same if is_cast and relative <= _MOST_ROUNDED else "changed"
        except Exception as error:  # cut off since, or no strided tensor
            text = spell(error)
    return Change(a.name, b.name, kind, text, relative)


def _distance(stored: Stored, other: Stored) -> tuple[float, bool]:
    """Return the relative difference, and whether each element of the narrower format is the nearest to the other's."""
    noise, square, is_cast = 0.0, 0.0, True
    for raw, other_raw in zip(*(side.parts(side.load(), _STEP) for side in (stored, other)), strict=True):
        x, y = stored.decode(raw), other.decode(other_raw)
        exact = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
        is_cast = is_cast and any(exact(a.to(b.dtype).double(), b.double()) for a, b in permutations((x, y)))
        x, y = x.double(), y.double()
        difference = (y - x).masked_fill((x == y) | (x.isnan() & y.isnan()), 0).nan_to_num(inf, inf, -inf)
        noise += float(difference.square().sum())
        square += float(x.nan_to_num(0, 0, 0).square().sum())
        stored.release(raw)
        other.release(other_raw)
    return sqrt(noise / square) if square else (inf if noise else 0.0), is_cast
