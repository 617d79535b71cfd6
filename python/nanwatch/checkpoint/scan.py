"""Scan of checkpoints: what is in each tensor, and what is wrong with it. Each file is read once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import isinf
from os import PathLike
from pathlib import Path
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor

from ..numerics._extension import explain_once
from ..numerics.block_fit import BLOCKS_BY_NAME, BlockFit
from ..numerics.fit import FORMATS, would_fit
from ..numerics.formats import BY_NAME, TensorHealth, limits
from ..numerics.ranges import PartialHealth, tensor_health
from ..numerics.readable import type_name, unreadable
from ..records.siblings import apart_from_siblings
from ..util.progress import Tell, silent
from ..util.visible import spell
from .against import compare
from .files import PIECE, Contents, Stored, open_checkpoint
from .result import Problem, Scan, TensorScan

_MANY_ZEROS, _MANY_ENCODED_ZEROS = 0.1, 0.25  # blocks of 4 bits make up to 17 % of random numbers zero
_MANY_SUBNORMALS = 0.01
_MANY_FLUSHED = {True: 0.25, False: 0.01}  # share that becomes zero in a format with blocks, and without
_SHOWN = 5  # dead rows whose numbers are kept
_CASTS = ("float16", "bfloat16")
_TARGETS = (*FORMATS, *BLOCKS_BY_NAME)
_Dead: TypeAlias = "tuple[int, tuple[int, ...]]"
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    explain_once()
    contents = Contents()
    for path in paths:
        contents.add(open_checkpoint(Path(path)))
    needs_fingerprints = against is not None
    tensors = list(_scanned(contents.tensors, tell, needs_fingerprints))
    comparison = None
    if against is not None:
        reference = open_checkpoint(Path(against))
        if not reference.tensors:
            why = "; ".join(text for _, text in reference.problems) or "it has no tensor"
            raise ValueError(f"{against} cannot be compared with: {why}")
        sides = (contents.tensors, tensors), (reference.tensors, [*_scanned(reference.tensors, tell, True)])
        comparison = compare(*sides, [text for _, text in reference.problems], tell)
    problems = list(_problems(contents, tensors))
    for name in formats:
        problems += _tried(contents.tensors, tensors, name, tell)
    other_path = None if against is None else str(against)
    return Scan(tuple(map(str, paths)), other_path, tuple(tensors), tuple(problems), comparison)


def _scanned(tensors: Sequence[Stored], tell: Tell, fingerprints: bool) -> Iterator[TensorScan]:
    total = sum(_size(file) for file in {stored.file for stored in tensors}) >> 20
    done = 0
    for stored in tensors:
        tell(f"reading {stored.file.name}", min(done >> 20, total), total, "MiB")
        result = TensorScan(stored.name, str(stored.file), "unknown", lost=stored.lost)
        try:
            if stored.load is not None:
                result = _read(stored, stored.load(), result, fingerprints)
        except ImportError:
            raise
        except (TypeError, NotImplementedError) as error:  # a dtype or a layout that PyTorch does not read
            result = replace(result, unread=spell(error))
        except Exception as error:  # a library meets the damage when it loads the tensor
            result = replace(result, lost=spell(error))
        done += result.nbytes
        yield result


def _size(path: Path) -> int:
    with suppress(OSError):
        return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size
    return 0


def _read(stored: Stored, x: Tensor, result: TensorScan, fingerprints: bool) -> TensorScan:
    dtype = str(x.dtype).removeprefix("torch.") if stored.encoding is None else stored.encoding.name.lower()
    shape = tuple(x.shape) if stored.encoding is None else stored.shape
    result = replace(result, dtype=dtype, shape=shape)
    if why := unreadable(x):
        return replace(result, unread=why)
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        return replace(result, health=tensor_health(x))
    total = PartialHealth()
    for start, raw, values in stored.pieces(x):
        total.add(values, start)
        if fingerprints:
            total.add_bits(raw)
    health = total.health(shape)
    result = replace(result, nbytes=x.nbytes, health=health)
    if fingerprints:
        of = (dtype, shape) if stored.encoding is None else ("uint8", (x.numel(),))
        result = replace(result, fingerprint=total.fingerprint(*of))
    if stored.encoding is not None:
        return result
    (rows, first_rows), (columns, first_columns) = _dead_lines(stored, x, health.num_zero)
    return replace(
        result,
        dead_rows=rows,
        dead_columns=columns,
        first_dead_rows=first_rows,
        first_dead_columns=first_columns,
    )


def _dead_lines(stored: Stored, x: Tensor, zeros: int) -> tuple[_Dead, _Dead]:
    """Return the rows of a matrix that are all zero, and the columns, which are all dimensions but the first.

    Nothing is read where fewer elements are zero than a line has.
    """
    form = BY_NAME.get(str(x.dtype).removeprefix("torch."))
    rows, width = (len(x), x.numel() // len(x)) if x.dim() > 1 and x.numel() else (0, 0)
    if form is None or form.kind not in ("ieee", "fn") or not 1 < min(rows, width) <= zeros:
        return (0, ()), (0, ())
    matrix = x.detach().reshape(rows, width)
    live_rows, live_columns = torch.zeros(rows, dtype=torch.bool), torch.zeros(width, dtype=torch.bool)
    step = max(PIECE // (width * x.element_size()), 1)
    for first in range(0, rows, step):
        band = matrix[first : first + step]
        nonzero = (band.view(_SIGNED[band.element_size()]) << 1) != 0  # without the sign of -0.0
        live_rows[first : first + step] = nonzero.any(1)
        live_columns |= nonzero.any(0)
        stored.release(band)
    return _dead(live_rows), _dead(live_columns)


def _dead(live: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return how many are not live, and the first few numbers. A list of all would take more memory than the scan."""
    first: list[int] = []
    for begin in range(0, len(live), 1 << 16):
        first += ((~live[begin : begin + (1 << 16)]).nonzero().flatten() + begin).tolist()
        if len(first) >= _SHOWN:
            break
    return len(live) - int(live.count_nonzero()), tuple(first[:_SHOWN])


def _problems(contents: Contents, tensors: Sequence[TensorScan]) -> Iterator[Problem]:
    """Yield the problems, faults first."""
    for path, text in contents.problems:
        yield Problem("file", True, f"{path}: {text}")
    for tensor in tensors:
        if tensor.lost:
            yield Problem("lost", True, tensor.lost, (tensor.name,))
        if tensor.health is not None and not tensor.health.isfinite:
            yield _nonfinite(tensor.name, tensor.health)
    for tensor in tensors:
        if tensor.health is not None and tensor.is_float and not _is_mask(tensor.health):
            yield from _of_values(tensor, tensor.health)
    yield from _outliers(tensors)
    for tensor in tensors:
        if tensor.unread:
            yield Problem("not checked", False, tensor.unread, (tensor.name,))


def _nonfinite(name: str, health: TensorHealth) -> Problem:
    counts = {"nan": health.num_nan, "inf": health.num_posinf, "-inf": health.num_neginf}
    named = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    is_mask = _is_mask(health)
    kind, rest = ("mask", "; all others are 0, as in a mask") if is_mask else ("non-finite", "")
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
    for what, count, first in (
        ("rows", tensor.dead_rows, tensor.first_dead_rows),
        ("columns", tensor.dead_columns, tensor.first_dead_columns),
    ):
        if count:
            listed = ", ".join(map(str, first)) + (", ..." if count > len(first) else "")
            yield Problem("dead", False, f"{count:,} {what} are all zero: {listed}", names)
    if health.num_subnormal >= _MANY_SUBNORMALS * numel:
        share = health.num_subnormal / numel
        yield Problem("subnormal", False, f"{share:.1%} of {numel:,} are subnormal in {tensor.dtype}", names)
    ends, largest = limits(tensor.dtype), health.finite_abs_max
    for target in _CASTS:
        narrow = limits(target)
        if ends is not None and narrow is not None and ends.largest > narrow.largest:
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


def _tried(stored: Sequence[Stored], tensors: list[TensorScan], name: str, tell: Tell) -> Iterator[Problem]:
    """Yield the matrices that leave a number format. Set `sqnr` in each of `tensors` for a block format."""
    for i, (source, tensor) in enumerate(zip(stored, tensors, strict=True)):
        is_matrix = len(tensor.shape) > 1 and tensor.is_float and not tensor.is_encoded
        if source.load is None or tensor.health is None or not is_matrix:
            continue
        tell(f"trying {name}", i, len(tensors), "tensors")
        x = source.load()
        fit = would_fit(x, name)
        source.release(x)
        is_block = isinstance(fit, BlockFit)
        over, zero = (
            (fit.saturated, fit.flushed) if isinstance(fit, BlockFit) else (fit.overflow, fit.underflow)
        )
        if isinstance(fit, BlockFit) and fit.signal:
            tensors[i] = replace(tensor, sqnr={**(tensor.sqnr or {}), name: fit.sqnr})
        if (over and not is_block) or zero >= _MANY_FLUSHED[is_block]:
            verb = "saturate" if is_block else "overflow"
            text = f"{over:.3%} {verb} and {zero:.3%} become zero in {name}"
            yield Problem("range", False, text, (tensor.name,))
