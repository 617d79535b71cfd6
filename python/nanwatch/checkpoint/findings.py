"""Findings of a scan: what is wrong with the tensors of a checkpoint, and what is worth a look."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import median
from typing import NamedTuple

import torch

from ..numerics.block_fit import BLOCKS_BY_NAME, block_fit, decibel
from ..numerics.fit import FORMATS, Edges, edges, would_fit
from ..numerics.formats import BY_NAME, TensorHealth
from ..records.siblings import apart_from_siblings
from .encodings import ENCODINGS
from .result import Finding, TensorScan
from .stored import Contents, DamagedError, OpenFiles, StoredTensor
from .streaming import Streamer, lines_of

_MANY_ZEROS = 0.1
_MANY_SUBNORMALS = 0.01
_MANY_FLUSHED = 0.25  # to blocks of 4 bits a matrix of random numbers loses up to 17 %
_CASTS = ("float16", "bfloat16")
_ELEMENTS = 1 << 17  # that a format is tried on at a time
_SHOWN = 4  # matrices of the lowest SQNR
TARGETS = (*FORMATS, *(name for name, form in BLOCKS_BY_NAME.items() if form.rows or form.columns))
"""Formats in which some rows of a matrix can be tried without the others."""


def find(contents: Contents, tensors: Sequence[TensorScan]) -> Iterator[Finding]:
    """Yield the findings, faults first."""
    for path, text in contents.problems:
        yield Finding("file", True, f"{path}: {text}")
    for one in tensors:
        if one.lost:
            yield Finding("lost", True, one.lost, (one.name,))
        if one.health is not None and not one.health.isfinite:
            yield _nonfinite(one, one.health)
    for path, text in contents.remarks:
        yield Finding("remark", False, f"{path}: {text}")
    for one in tensors:
        if one.health is not None and one.is_float and not _is_mask(one.health):
            yield from _of_values(one, one.health)
    yield from _apart(tensors)
    yield from _copies(contents.tensors, tensors)
    for one in tensors:
        if one.unread:
            yield Finding("not checked", False, one.unread, (one.name,))


def _nonfinite(one: TensorScan, health: TensorHealth) -> Finding:
    counts = {"nan": health.num_nan, "inf": health.num_posinf, "-inf": health.num_neginf}
    said = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    is_mask = _is_mask(health)
    kind, more = ("mask", "; all others are 0, as in a mask") if is_mask else ("non-finite", "")
    first = list(health.first_nonfinite or ())
    return Finding(kind, not is_mask, f"{said} of {health.numel:,}, the first at {first}{more}", (one.name,))


def _is_mask(health: TensorHealth) -> bool:
    """Return whether it may be a mask of attention: nothing but zeros and -inf."""
    return 0 < health.num_neginf == health.numel - health.num_zero


def _of_values(one: TensorScan, health: TensorHealth) -> Iterator[Finding]:
    names, numel = (one.name,), health.numel
    if health.num_zero == numel:
        if numel > 1:
            yield Finding("all zero", False, f"all {numel:,} elements", names)
        return
    if health.num_zero >= (_MANY_FLUSHED if one.dtype in ENCODINGS else _MANY_ZEROS) * numel:
        yield Finding("zeros", False, f"{health.num_zero / numel:.1%} of {numel:,}", names)
    for what, count, first in (
        ("rows", one.dead_rows, one.first_dead_rows),
        ("columns", one.dead_columns, one.first_dead_columns),
    ):
        if count:
            more = ", ..." if count > len(first) else ""
            listed = ", ".join(map(str, first))
            yield Finding("dead", False, f"{count:,} {what} are all zero: {listed}{more}", names)
    if health.num_subnormal >= _MANY_SUBNORMALS * numel:
        share = health.num_subnormal / numel
        yield Finding("subnormal", False, f"{share:.1%} of {numel:,} are subnormal in {one.dtype}", names)
    largest = health.finite_abs_max
    for target, ends in _narrower(one.dtype):
        if largest >= ends.overflows_from:
            yield Finding("range", False, f"abs max {largest:.4g} overflows in {target}", names)
        elif 0 < largest < ends.normal_from:
            text = f"abs max {largest:.4g}: every element would be subnormal or zero in {target}"
            yield Finding("range", False, text, names)


@lru_cache
def _narrower(dtype: str) -> list[tuple[str, Edges]]:
    """Return the formats whose range is narrower, with their edges."""
    form = BY_NAME.get(dtype)
    narrower = [one for one in _CASTS if form and form.ends.largest > BY_NAME[one].ends.largest]
    return [(one, edges(one)) for one in narrower]


def _apart(tensors: Sequence[TensorScan]) -> Iterator[Finding]:
    peaks: dict[tuple[str, str], float] = {}
    for one in tensors:
        if one.health is not None and one.is_float:
            module, _, label = one.name.rpartition(".")
            peaks[module, label] = one.health.finite_abs_max
    for factor, (module, label), pattern, siblings in apart_from_siblings(peaks):
        name = f"{module}.{label}" if module else label
        text = (
            f"abs max {peaks[module, label]:.4g} is {factor:.3g} times the median {median(siblings):.4g} of the"
            f" {len(siblings)} other {pattern}.{label}"
        )
        yield Finding("outlier", False, text, (name,))


def _copies(stored: Sequence[StoredTensor], tensors: Sequence[TensorScan]) -> Iterator[Finding]:
    """Yield the tensors that share their bytes, and those that have equal ones."""
    places: dict[Hashable, list[TensorScan]] = defaultdict(list)
    for one, tensor in zip(stored, tensors, strict=True):
        if one.source is not None and not one.lost and tensor.nbytes:
            places[one.source, one.dtype, one.shape, one.order].append(tensor)
    equal: dict[Hashable, list[TensorScan]] = defaultdict(list)
    for group in places.values():
        if len(group) > 1:
            yield Finding("tied", False, "one tensor under several names", tuple(one.name for one in group))
        first = group[0]
        # Every norm begins as ones, every bias as zeros.
        health = first.health
        if first.fingerprint is not None and not (health and health.abs_min == health.abs_max):
            equal[first.fingerprint, first.dtype, first.shape].append(first)
    for group in equal.values():
        if len(group) > 1:
            names = tuple(one.name for one in group)
            files = f" in {', '.join(one.file for one in group)}" if len(set(names)) < len(names) else ""
            yield Finding("duplicate", False, f"equal to the bit{files}", names)


def tried(stored: Sequence[StoredTensor], tensors: list[TensorScan], name: str) -> Iterator[Finding]:
    """Yield the matrices that leave a number format: read again, and tried in it.

    For a block format, also yield one SQNR over all matrices, and set `sqnr` in each of `tensors`.
    """
    errors: list[tuple[float, _Loss, str]] = []
    for i, (tensor, one) in enumerate(zip(stored, tensors, strict=True)):
        if one.health is None or tensor.dtype in ENCODINGS or tensor.order or lines_of(tensor) == (0, 0):
            continue
        try:
            loss = _loss(tensor, name, one.health.abs_max)
        except (DamagedError, OSError) as error:  # cut off since
            yield Finding("not checked", False, f"in {name}: {str(error)[:200]}", (one.name,))
            continue
        overflow, underflow = (count / max(loss.num_elements, 1) for count in (loss.over, loss.under))
        if overflow or underflow >= (_MANY_FLUSHED if name in BLOCKS_BY_NAME else _MANY_SUBNORMALS):
            verb = "become nan or inf" if name in BLOCKS_BY_NAME else "overflow"
            text = f"{overflow:.3%} {verb} and {underflow:.3%} become zero in {name}"
            yield Finding("range", False, text, (one.name,))
        if name in BLOCKS_BY_NAME and loss.signal:
            sqnr = decibel(loss.signal, loss.noise)
            tensors[i] = replace(one, sqnr={**(one.sqnr or {}), name: sqnr})
            errors.append((sqnr, loss, one.name))
    if errors:
        errors.sort(key=lambda error: error[0])
        total = decibel(*(sum(parts) for parts in zip(*(loss[-2:] for _, loss, _ in errors), strict=True)))
        text = f"{total:.1f} dB in {name} over {len(errors):,} matrices, {errors[0][0]:.1f} dB in the lowest"
        yield Finding("sqnr", False, text, tuple(named for *_, named in errors[:_SHOWN]))


class _Loss(NamedTuple):
    """Counts of elements, of those that overflow, and of those that become zero; of blocks also signal and noise."""

    num_elements: int
    over: int
    under: int
    signal: float
    noise: float


def _loss(tensor: StoredTensor, name: str, abs_max: float) -> _Loss:
    """Return what a tensor loses in a format. Reads some rows at a time."""
    form, width = BLOCKS_BY_NAME.get(name), tensor.shape[-1]
    blocks = width * ((form and form.rows) or 1)
    step = max(_ELEMENTS // blocks, 1) * blocks
    losses = []
    with OpenFiles() as files:
        streamer = Streamer(files)
        for at in range(0, tensor.numel, step):
            values = streamer.values(tensor, at, min(step, tensor.numel - at)).view(-1, width)
            if form is None:
                plain = would_fit(values, getattr(torch, name))
                losses.append(_Loss(plain.num_elements, plain.num_overflow, plain.num_underflow, 0.0, 0.0))
            else:
                fit = block_fit(values, form, -1, abs_max)
                losses.append(_Loss(fit.num_elements, fit.num_lost, fit.num_flushed, fit.signal, fit.noise))
    return _Loss(*(sum(parts) for parts in zip(*losses, strict=True)))
