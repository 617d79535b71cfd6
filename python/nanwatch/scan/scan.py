"""Scan of checkpoints: what is in each tensor, and what is wrong with it. Each file is read once, in threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import chain, islice
from math import isinf
from os import PathLike
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ..history.suspicion import apart_from_siblings
from ..numerics import _extension
from ..numerics.block_fit import BLOCKS_BY_NAME, BlockFit
from ..numerics.fit import FORMATS, would_fit
from ..numerics.formats import BY_NAME, TensorHealth, limits
from ..numerics.ranges import PartialHealth, health_of, tensor_health
from ..numerics.readable import dtype_name, type_name, unreadable
from ..util.progress import Tell, silent
from ..util.visible import spell
from .against import Member, compare
from .files import PART, Stored, open_checkpoint
from .result import Change, Problem, Scan, TensorScan

_MANY_ZEROS, _MANY_ENCODED_ZEROS = 0.1, 0.25  # blocks of 4 bits make up to 17 % of random numbers zero
_MANY_SUBNORMALS = 0.01
_MANY_FLUSHED = {True: 0.25, False: 0.01}  # share that becomes zero in a format with blocks, and without
_SHOWN = 5  # dead rows whose numbers are kept
_CASTS = ("float16", "bfloat16")
_TARGETS = (*FORMATS, *BLOCKS_BY_NAME)
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_THREADS = 16  # more are no faster, and each has 4 MiB of the file in memory
_MOST_AT_A_TIME = 8  # tensors that a thread reads together
# Dtypes of which any bytes are a value. A file may have any byte where a bool should be.
_ORDINARY = {getattr(torch, name, None) for name in BY_NAME} - {None, torch.bool}
_loading = Lock()


def scan(
    *paths: str | PathLike[str],
    against: str | PathLike[str] | None = None,
    to: str | Sequence[str] = (),
    tell: Tell = silent,
) -> Scan:
    """Read all tensors of a checkpoint and return what is wrong with them, without running anything of it.

    `paths`: files of safetensors, torch.save (.pt, .pth, .bin), GGUF or NumPy (.npz, .npy), an index of such files, or
    folders with these or of torch.distributed.checkpoint. Several are one checkpoint. `against`: another checkpoint;
    the result then says which tensors differ and how far. `to`: number formats ("float16", "mxfp8") that each matrix of
    floating point is tried in, which takes another read.

    Files are mapped, so that memory does not grow with them. What cannot be mapped is loaded: a tensor at a time from
    .npz and torch.distributed.checkpoint, and whole files of the format before PyTorch 1.6. Damaged files are problems
    of the result. Raises OSError for a path that is not there, ValueError for one that is no checkpoint and for an
    unknown format, ImportError where the package for a format is missing.

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
    formats = to.split(",") if isinstance(to, str) and to else tuple(to)
    for name in formats:
        if name not in _TARGETS:
            raise ValueError(f"scan got the format {name!r}; accepted are {', '.join(_TARGETS)}")
    _extension.explain_once()
    members, problems = _read_all(paths, tell, fingerprints=against is not None)
    changes: list[Change] = []
    other_path = None if against is None else str(against)
    if other_path is not None:
        reference, faults = _read_all([other_path], tell, fingerprints=True)
        if not reference:
            why = "; ".join(fault.text for fault in faults) or "it has no tensor"
            raise ValueError(f"{other_path} cannot be compared with: {why}")
        changes = [Change(other_path, other_path, "not compared", fault.text) for fault in faults]
        changes += compare(members, reference, tell)
    tensors = tuple(tensor for _, tensor in members)
    problems += _problems(tensors)
    misfits = {name: [*_tried(members, name, tell)] for name in formats}
    fitting = tuple(name for name in formats if not misfits[name])
    problems = sorted(chain(problems, *misfits.values()), key=lambda problem: not problem.is_fault)
    return Scan(tuple(map(str, paths)), other_path, tensors, tuple(problems), tuple(changes), fitting)


def _read_all(
    paths: Sequence[str | PathLike[str]], tell: Tell, *, fingerprints: bool
) -> tuple[list[Member], list[Problem]]:
    """Return the tensors of these files with what is in them, and the problems of the files."""
    entries = [entry for path in paths for entry in open_checkpoint(Path(path))]
    tensors = [entry for entry in entries if isinstance(entry, Stored)]
    scans: dict[int, TensorScan] = {}
    unread = iter(enumerate(tensors))  # of which each thread takes the next

    def read_on() -> None:
        while batch := [*islice(unread, at_a_time)]:
            # Each step for several tensors: the data flush the caches, and the code of a step is loaded once for all.
            loaded = [_load_mapped(stored) for _, stored in batch]
            rows = [
                None if fingerprints else _health_row(stored, x)
                for (_, stored), x in zip(batch, loaded, strict=True)
            ]
            for (number, stored), x, row in zip(batch, loaded, rows, strict=True):
                scans[number] = _read(stored, x, row, fingerprints)
            for stored in {stored.regions: stored for _, stored in batch}.values():
                stored.release()

    tell("reading", 0, len(tensors), "tensors")
    num_threads = min(torch.get_num_threads(), _MOST_THREADS)
    at_a_time = min(_MOST_AT_A_TIME, 1 + len(tensors) // (8 * num_threads))
    with ThreadPoolExecutor(num_threads, "nanwatch-scan", _compute_alone) as pool:
        try:
            pending = [pool.submit(read_on) for _ in range(num_threads)]
            while wait(pending, timeout=0.1).not_done:
                tell("reading", len(scans), len(tensors), "tensors")
            for future in pending:
                future.result()
        finally:
            for _ in unread:  # after an error or Ctrl-C the threads find nothing more
                pass
    members = [(stored, scans[number]) for number, stored in enumerate(tensors)]
    return members, [entry for entry in entries if isinstance(entry, Problem)]


def _compute_alone() -> None:
    """Let PyTorch use this thread alone for what it calls: the others read other tensors.

    `torch.set_num_threads` would change the number for threads of the program too.
    """
    torch.get_num_threads()  # sets the number of a new thread
    set_num_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_num_threads is not None:
        set_num_threads(1)


def _load_mapped(stored: Stored) -> Tensor | None:
    """Return a mapped tensor, of which nothing is read yet; None for any other, or after an error."""
    if stored.load is not None and stored.regions:
        with suppress(Exception):  # which `_read` meets again
            return stored.load()
    return None


def _health_row(stored: Stored, x: Tensor | None) -> Tensor | None:
    """Return the health of an ordinary tensor, which one call reads; None for any other."""
    if x is None or type(x) is not Tensor or stored.encoding is not None or x.nbytes > PART or x.is_nested:
        return None
    return _extension.health(x) if x.layout is torch.strided and x.dtype in _ORDINARY else None


def _read(stored: Stored, x: Tensor | None, row: Tensor | None, fingerprints: bool) -> TensorScan:
    facts: dict[str, Any] = {"lost": stored.lost}  # those that are known before an error stay
    try:
        if x is not None:
            _read_values(stored, x, row, fingerprints, facts)
        elif stored.load is not None:
            with _loading:  # a tensor at a time is in memory
                _read_values(stored, stored.load(), None, fingerprints, facts)
    except ImportError:
        raise
    except (TypeError, NotImplementedError) as error:  # a dtype or a layout that PyTorch does not read
        facts["unread"] = spell(error)
    except Exception as error:  # a library meets the damage when it loads the tensor
        facts["lost"] = spell(error)
    return TensorScan(stored.name, str(stored.file), **facts)


def _read_values(
    stored: Stored, x: Tensor, row: Tensor | None, fingerprints: bool, facts: dict[str, Any]
) -> None:
    """Set the fields of a TensorScan."""
    is_plain = stored.encoding is None
    facts["dtype"] = dtype = dtype_name(x.dtype) if is_plain else stored.encoding.name.lower()
    facts["shape"] = shape = tuple(x.shape) if is_plain else stored.shape
    if row is not None:
        facts["health"] = health = health_of(row.tolist(), shape)
    elif why := unreadable(x):
        facts["unread"] = why
        return
    elif x.layout is not torch.strided or x.is_nested or x.is_quantized:
        facts["health"] = tensor_health(x)
        return
    else:
        total = PartialHealth()
        for start, raw, values in stored.parts(x):
            total.add(values, start)
            if fingerprints:
                total.add_bits(raw)
        facts["health"] = health = total.health(shape)
        if fingerprints:
            form = (dtype, shape) if is_plain else ("uint8", (x.numel(),))
            facts["fingerprint"] = total.fingerprint(*form)
    facts["nbytes"] = x.nbytes
    if is_plain and health.num_zero and x.dim() > 1:
        facts.update(_dead_rows(stored, x, health.num_zero))


def _dead_rows(stored: Stored, x: Tensor, zeros: int) -> dict[str, Any]:
    """Return the rows of a matrix that are all zero. Nothing is read where fewer elements are zero than a row has."""
    form = BY_NAME.get(dtype_name(x.dtype))
    width = x.numel() // len(x)
    if form is None or form.kind not in ("ieee", "fn") or not 1 < width <= zeros:
        return {}
    matrix, live = x.detach().reshape(len(x), width), torch.zeros(len(x), dtype=torch.bool)
    step = max(PART // (width * x.element_size()), 1)
    for first in range(0, len(x), step):
        band = matrix[first : first + step]
        shifted = band.view(_SIGNED[band.element_size()]) << 1  # without the sign of -0.0
        live[first : first + step] = shifted.any(1)
        stored.release()
    num_dead = len(live) - int(live.count_nonzero())
    dead = (number for number, is_live in enumerate(live.numpy()) if not is_live)
    return {"dead_rows": num_dead, "first_dead_rows": tuple(islice(dead, min(num_dead, _SHOWN)))}


# Search for problems in the tensors.


def _problems(tensors: Sequence[TensorScan]) -> Iterator[Problem]:
    for tensor in tensors:
        if tensor.lost:
            yield Problem("lost", True, tensor.lost, (tensor.name,))
        if tensor.health is not None and not tensor.health.isfinite:
            yield _nonfinite(tensor.name, tensor.health)
        if tensor.health is not None and tensor.is_float and not _is_mask(tensor.health):
            yield from _of_values(tensor, tensor.health)
    yield from _outliers(tensors)
    for tensor in tensors:
        if tensor.unread:
            yield Problem("not checked", False, tensor.unread, (tensor.name,))


def _nonfinite(name: str, health: TensorHealth) -> Problem:
    counts = {"nan": health.num_nan, "inf": health.num_posinf, "-inf": health.num_neginf}
    named = ", ".join(f"{count:,} {value}" for value, count in counts.items() if count)
    kind, rest = "non-finite", ""
    if is_mask := _is_mask(health):
        kind, rest = "mask", "; all others are 0, as in a mask"
    first = list(health.first_nonfinite or ())
    return Problem(kind, not is_mask, f"{named} of {health.numel:,}, the first at {first}{rest}", (name,))


def _is_mask(health: TensorHealth) -> bool:
    """Return whether it may be a mask of attention: nothing but zeros and -inf."""
    return 0 < health.num_neginf == health.numel - health.num_zero


def _of_values(tensor: TensorScan, health: TensorHealth) -> Iterator[Problem]:
    names, numel = (tensor.name,), health.numel
    if health.num_zero == numel:
        if numel > 1:
            yield Problem("all zero", False, f"all {numel:,} elements", names)
        return
    if health.num_zero >= (_MANY_ENCODED_ZEROS if tensor.is_encoded else _MANY_ZEROS) * numel:
        yield Problem("zeros", False, f"{health.num_zero / numel:.1%} of {numel:,}", names)
    if count := tensor.dead_rows:
        listed = ", ".join(map(str, tensor.first_dead_rows)) + (", ..." if count > _SHOWN else "")
        yield Problem("dead", False, f"{count:,} rows are all zero: {listed}", names)
    if health.num_subnormal >= _MANY_SUBNORMALS * numel:
        share = health.num_subnormal / numel
        yield Problem("subnormal", False, f"{share:.1%} of {numel:,} are subnormal in {tensor.dtype}", names)
    ends, largest = limits(tensor.dtype), health.finite_abs_max
    for target in _CASTS:
        narrow = limits(target)
        assert narrow is not None
        if ends is None or ends.largest <= narrow.largest or largest == 0:  # nothing but zeros and nan
            continue
        if narrow.smallest_normal <= largest <= narrow.largest:
            continue
        cast = float(torch.tensor(largest, dtype=torch.float64).to(getattr(torch, target)))
        if isinf(cast):
            yield Problem("range", False, f"abs max {largest:.4g} overflows in {target}", names)
        elif cast < narrow.smallest_normal:
            text = f"abs max {largest:.4g}: every element would be subnormal or zero in {target}"
            yield Problem("range", False, text, names)


def _outliers(tensors: Sequence[TensorScan]) -> Iterator[Problem]:
    peaks: dict[tuple[str, str], float] = {}
    for tensor in tensors:
        if tensor.health is not None and tensor.is_float:
            module, _, label = tensor.name.rpartition(".")
            peaks[module, label] = tensor.health.finite_abs_max
    for factor, (module, label), pattern, siblings in apart_from_siblings(peaks):
        text = (
            f"abs max {peaks[module, label]:.4g} is {factor:.3g} times the median {median(siblings):.4g} of the"
            f" {len(siblings)} other {pattern}.{label}"
        )
        yield Problem("outlier", False, text, (f"{module}.{label}" if module else label,))


def _tried(members: Sequence[Member], name: str, tell: Tell) -> Iterator[Problem]:
    """Yield the matrices that leave a number format."""
    for number, (stored, tensor) in enumerate(members):
        is_matrix = len(tensor.shape) > 1 and tensor.is_float and not tensor.is_encoded
        if stored.load is None or tensor.health is None or not is_matrix:
            continue
        tell(f"trying {name}", number, len(members), "tensors")
        fit: Any = would_fit(stored.load(), name)
        stored.release()
        is_block = isinstance(fit, BlockFit)
        beyond, zero = (fit.saturated, fit.flushed) if is_block else (fit.overflow, fit.underflow)
        if (beyond and not is_block) or zero >= _MANY_FLUSHED[is_block]:
            verb = "saturate" if is_block else "overflow"
            text = f"{beyond:.3%} {verb} and {zero:.3%} become zero in {name}"
            yield Problem("range", False, text, (tensor.name,))
