"""The operators `torch.ops.nanwatch.*`: each schema, its fake, its fallback. Nothing else calls an operator.

They exist as soon as this module is imported, with or without the compiled part: `_reference` serves every device
and layout, and a native kernel registered for a device takes its place there. The dispatcher chooses, no `if` does.

A row is a measurement, not a function to differentiate: the autograd keys fall through, so no graph is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _extension, _fingerprint, _reference

_library = torch.library.Library("nanwatch", "DEF")


def define(schema: str, fallback: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register one operator and return its overload: resolving `torch.ops.nanwatch.name` costs as much again."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"nanwatch::{name}", fake, lib=_library)
    # Nested tensors have dispatch keys of their own, which no alias key covers.
    for key in ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA"):
        _library.impl(name, fallback, key)
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    if (
        _extension.stable_operators
    ):  # whose kernels cannot go past themselves to the fallback of the same operator
        _library.define(f"reference_{schema}")
        _library.impl(f"reference_{name}", fallback, "CompositeExplicitAutograd")
    overload: Callable[..., Any] = getattr(torch.ops.nanwatch, name).default
    return overload


def _row(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=_reference.row_dtype(x.device), device=x.device)


def _fake_abs_range(x: Tensor) -> Tensor:
    return _row(x, _reference.RANGE_WIDTH)


_abs_range = define("abs_range(Tensor x) -> Tensor", _reference.abs_range, _fake_abs_range)


def _fake_abs_ranges(xs: Sequence[Tensor]) -> Tensor:
    if not xs:
        return torch.empty((0, _reference.RANGE_WIDTH), dtype=torch.float64)
    return _row(xs[0], len(xs), _reference.RANGE_WIDTH)


_abs_ranges = define("abs_ranges(Tensor[] xs) -> Tensor", _reference.abs_ranges, _fake_abs_ranges)


def _fake_health(x: Tensor) -> Tensor:
    return _row(x, _reference.HEALTH_WIDTH)


_health = define("health(Tensor x) -> Tensor", _reference.health, _fake_health)


def _fake_exponent_histogram(x: Tensor) -> Tensor:
    columns = _reference.EXPONENT_HEAD + len(_reference.exponents_of(x.dtype))
    return torch.empty((columns,), dtype=torch.int64, device=x.device)


_exponent_histogram = define(
    "exponent_histogram(Tensor x) -> Tensor", _reference.exponent_histogram, _fake_exponent_histogram
)


def _fake_count_from(x: Tensor, codes: Sequence[int]) -> Tensor:
    return torch.empty((len(codes),), dtype=torch.int64, device=x.device)


_count_from = define("count_from(Tensor x, int[] codes) -> Tensor", _reference.count_from, _fake_count_from)


def _fake_fingerprint(x: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=x.device)


_fingerprint_op = define("fingerprint(Tensor x) -> Tensor", _fingerprint.fingerprint, _fake_fingerprint)


def _fake_range_and_fingerprint(x: Tensor) -> tuple[Tensor, Tensor]:
    return _fake_abs_range(x), _fake_fingerprint(x)


_range_and_fingerprint = define(
    "range_and_fingerprint(Tensor x) -> (Tensor, Tensor)",
    lambda x: (_abs_range(x), _fingerprint_op(x)),  # in two reads, each native where its device has a kernel
    _fake_range_and_fingerprint,
)


def _would_be_copied(x: Tensor) -> bool:
    """Return whether the dispatcher would copy `x` at its full logical size: expanded, and a conj or neg view."""
    return (x.is_conj() or x.is_neg()) and _reference.without_repeats(x)[1] > 1


def abs_range(x: Tensor) -> Tensor:
    """Return `(abs_min, abs_max, isfinite)` of `x`: shape (3,), float64 (float32 on mps), on x's device, no sync."""
    row: Tensor = _reference.abs_range(x) if _would_be_copied(x) else _abs_range(x)
    return row


def abs_ranges(xs: Sequence[Tensor]) -> Tensor:
    """Return an `abs_range` row per tensor: shape (n, 3), float64, on the one device all of `xs` are on, no sync."""
    # The range of what is repeated is the range of all.
    rows: Tensor = _abs_ranges([_reference.without_repeats(x)[0] if _would_be_copied(x) else x for x in xs])
    return rows


def health(x: Tensor) -> Tensor:
    """Return range and counts of `x`: shape (11,), columns as in `_reference.health`, on x's device, no sync."""
    row: Tensor = _reference.health(x) if _would_be_copied(x) else _health(x)
    return row


def exponent_histogram(x: Tensor) -> Tensor:
    """Count the elements in each power of two: int64, columns as in `_reference`, on x's device, no sync."""
    read = _reference.exponent_histogram if _would_be_copied(x) else _exponent_histogram
    counts: Tensor = read(x)
    return counts


def count_from(x: Tensor, codes: Sequence[int]) -> Tensor:
    """Count the elements that reach each magnitude: int64, one for each of `codes`, on x's device, no sync."""
    read = _reference.count_from if _would_be_copied(x) else _count_from
    counts: Tensor = read(x, list(codes))
    return counts


def fingerprint(x: Tensor) -> Tensor:
    """Return a hash of the bits of `x`: int64 of shape (), on x's device, no sync."""
    found: Tensor = _fingerprint_op(x)
    return found


def range_and_fingerprint(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of `abs_range` and `fingerprint` from one read where the compiled part has the dtype."""
    row, found = _range_and_fingerprint(x)
    return row, found
