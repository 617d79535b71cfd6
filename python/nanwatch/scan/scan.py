"""Scan of checkpoints: what is in each tensor, and what is wrong with it. Each file is read once, in threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import islice
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
from ..numerics.formats import TensorHealth, limits
from ..numerics.ranges import PartialHealth, health_of, tensor_health
from ..numerics.readable import dtype_name, is_plain, type_name, unreadable
from ..util.progress import Tell, silent
from ..util.visible import spell
from .against import Member, compare
from .files import Stored, open_checkpoint
from .result import Change, Problem, Scan, TensorScan

PART = 1 << 20  # elements: a call of a kernel costs nothing beside it, and all threads together stay small
_MANY_ZEROS, _MANY_ENCODED_ZEROS = 0.1, 0.25  # blocks of 4 bits make up to 17 % of random numbers zero
_MANY_SUBNORMALS = 0.01
_SHOWN = 5  # dead rows whose numbers are kept
_CASTS = ("float16", "bfloat16")
_MOST_THREADS = 16  # more are no faster, and each has a part in memory
_MOST_AT_A_TIME = 8  # tensors that a thread takes together
_loading = Lock()


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
    of the result. Raises OSError for a path that is not there, ValueError for one that is no checkpoint,
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
        for fault in faults:
            names = fault.tensors or (str(against),)
            changes += (Change(name, name, "not compared", fault.text) for name in names)
        changes += compare(members, others, tell)
    tensors = tuple(tensor for _, tensor in members)
    problems = sorted([*problems, *_problems(tensors)], key=lambda problem: not problem.is_fault)
    files = tuple(map(str, paths)), None if against is None else str(against)
    return Scan(*files, tensors, tuple(problems), tuple(changes))


def _read_all(
    paths: Sequence[str | PathLike[str]], tell: Tell, *, fingerprints: bool
) -> tuple[list[Member], list[Problem]]:
    """Return the tensors of these files with what is in them, and the problems of the files."""
    entries = [entry for path in paths for entry in open_checkpoint(Path(path))]
    tensors = [entry for entry in entries if isinstance(entry, Stored)]
    num_threads = min(torch.get_num_threads(), _MOST_THREADS)
    size = min(_MOST_AT_A_TIME, 1 + len(tensors) // (8 * num_threads))
    batches = [tensors[first : first + size] for first in range(0, len(tensors), size)]
    scans: list[TensorScan] = []
    tell("reading", 0, len(tensors), "tensors")
    with ThreadPoolExecutor(num_threads, "nanwatch-scan", _compute_alone) as pool:
        for batch in pool.map(partial(_read_batch, fingerprints=fingerprints), batches):
            scans += batch
            tell("reading", len(scans), len(tensors), "tensors")
    problems = [entry for entry in entries if isinstance(entry, Problem)]
    return [*zip(tensors, scans, strict=True)], problems


def _compute_alone() -> None:
    """Let PyTorch use this thread alone for what it calls: the others read other tensors.

    `torch.set_num_threads` would change the number for threads of the program too.
    """
    torch.get_num_threads()  # sets the number of a new thread
    set_num_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_num_threads is not None:
        set_num_threads(1)


def _read_batch(batch: Sequence[Stored], fingerprints: bool) -> list[TensorScan]:
    scans = [_read(stored, fingerprints) for stored in batch]
    for stored in {stored.regions: stored for stored in batch}.values():
        stored.release()
    return scans


def _read(stored: Stored, fingerprints: bool) -> TensorScan:
    facts: dict[str, Any] = {}  # those that are known before an error stay
    try:
        # One tensor at a time is in memory where the file is not mapped.
        with nullcontext() if stored.regions else _loading:
            _read_values(stored, stored.load(), fingerprints, facts)
    except ImportError:
        raise
    except (TypeError, NotImplementedError) as error:  # a dtype or a layout that PyTorch does not read
        facts["unread"] = spell(error)
    except Exception as error:  # a library meets the damage when it loads the tensor
        facts["lost"] = spell(error)
    return TensorScan(stored.name, str(stored.file), **facts)


def _read_values(stored: Stored, x: Tensor, fingerprints: bool, facts: dict[str, Any]) -> None:
    """Set the fields of a TensorScan."""
    is_encoded = stored.encoding is not None
    facts["dtype"] = dtype = stored.encoding.name.lower() if is_encoded else dtype_name(x.dtype)
    facts["shape"] = shape = stored.shape if is_encoded else tuple(x.shape)
    if why := unreadable(x):
        facts["unread"] = why
        return
    if not is_plain(x):
        facts["health"] = tensor_health(x)
        return
    if x.numel() <= PART and not (fingerprints or is_encoded or x.dtype is torch.bool):
        # 1 MiB takes 0.88 of the time that parts of it take.
        health = health_of(_extension.health(x).tolist(), shape)
    else:
        total = PartialHealth()
        for start, raw, values in stored.parts(x, PART):
            total.add(values, start)
            if fingerprints:
                total.add_bits(raw)
        health = total.health(shape)
    facts["nbytes"], facts["health"] = x.nbytes, health
    if fingerprints:
        facts["fingerprint"] = total.fingerprint(*(("uint8", (x.numel(),)) if is_encoded else (dtype, shape)))
    if not is_encoded and x.is_floating_point() and x.dim() > 1:
        facts.update(_dead_rows(stored, x, health.num_zero))


def _dead_rows(stored: Stored, x: Tensor, zeros: int) -> dict[str, Any]:
    """Return the rows of a matrix that are all zero. Nothing is read where fewer elements are zero than a row has."""
    width = x.numel() // max(len(x), 1)
    if not 1 < width <= zeros:
        return {}
    matrix, live = x.detach().reshape(len(x), width), torch.zeros(len(x), dtype=torch.bool)
    step = max(PART // width, 1)
    for first in range(0, len(x), step):
        band = matrix[first : first + step]
        # `any` refuses formats of 8 bits.
        live[first : first + step] = (band.float() if band.element_size() == 1 else band).any(1)
        stored.release()
    num_dead = len(live) - int(live.count_nonzero())
    dead = (number for number, is_live in enumerate(live.numpy()) if not is_live)
    return {"dead_rows": num_dead, "first_dead_rows": tuple(islice(dead, min(num_dead, _SHOWN)))}


# Search for problems in the tensors.


def _problems(tensors: Sequence[TensorScan]) -> Iterator[Problem]:
    for tensor in tensors:
        if tensor.lost:
            yield Problem("lost", True, tensor.lost, (tensor.name,))
        if tensor.unread:
            yield Problem("not checked", False, tensor.unread, (tensor.name,))
        if tensor.health is not None and not tensor.health.isfinite:
            yield _nonfinite(tensor.name, tensor.health)
        if tensor.health is not None and tensor.is_float and not _is_mask(tensor.health):
            yield from _of_values(tensor, tensor.health)
    yield from _outliers(tensors)


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
