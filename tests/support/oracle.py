"""Expected ranges and healths, by arithmetic from the definition of each number format.

Nothing here asks torch to convert a number: bit patterns are taken apart in numpy and put together as float64.
"""

import math
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Format:
    """sign | exponent | fraction, and which codes are no numbers."""

    exponent_bits: int
    fraction_bits: int
    bias: int
    kind: str  # "ieee", "fn" (no inf, nan is all ones), "fnuz" (nan is the negative zero), "e8m0" (powers of two)

    @property
    def width(self) -> int:
        return self.exponent_bits + self.fraction_bits + (self.kind != "e8m0")

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, -self.bias if self.kind == "e8m0" else 1 - self.bias)


FORMATS = {
    torch.float64: Format(11, 52, 1023, "ieee"),
    torch.float32: Format(8, 23, 127, "ieee"),
    torch.float16: Format(5, 10, 15, "ieee"),
    torch.bfloat16: Format(8, 7, 127, "ieee"),
    torch.float8_e4m3fn: Format(4, 3, 7, "fn"),
    torch.float8_e5m2: Format(5, 2, 15, "ieee"),
    torch.float8_e4m3fnuz: Format(4, 3, 8, "fnuz"),
    torch.float8_e5m2fnuz: Format(5, 2, 16, "fnuz"),
    torch.float8_e8m0fnu: Format(8, 0, 127, "e8m0"),
}
FLOATS = tuple(FORMATS)
FLOATS_8 = tuple(dtype for dtype in FLOATS if FORMATS[dtype].width == 8)
FLOATS_16 = tuple(dtype for dtype in FLOATS if FORMATS[dtype].width == 16)
INTEGERS = (
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Expected = namedtuple(
    "Expected",
    "abs_min abs_max isfinite finite_abs_min finite_abs_max num_nan num_posinf num_neginf num_zero num_subnormal numel"
    " first_nonfinite",
)


def decode(dtype: torch.dtype, patterns: np.ndarray) -> np.ndarray:
    """The float64 value of each bit pattern of `dtype`."""
    form = FORMATS[dtype]
    bits = patterns.astype(np.uint64)
    fraction = bits & np.uint64((1 << form.fraction_bits) - 1)
    exponent = (bits >> np.uint64(form.fraction_bits)) & np.uint64((1 << form.exponent_bits) - 1)
    if form.kind == "e8m0":
        values = np.ldexp(1.0, exponent.astype(np.int64) - form.bias)
        return np.where(exponent == 0xFF, np.nan, values)
    negative = (bits >> np.uint64(form.width - 1)) == 1
    leading = np.where(exponent > 0, np.uint64(1 << form.fraction_bits), np.uint64(0))
    power = np.maximum(exponent.astype(np.int64), 1) - form.bias - form.fraction_bits
    with np.errstate(over="ignore"):
        values = np.ldexp((fraction + leading).astype(np.float64), power)
    top = exponent == (1 << form.exponent_bits) - 1
    if form.kind == "ieee":
        values = np.where(top, np.where(fraction == 0, np.inf, np.nan), values)
    elif form.kind == "fn":
        values = np.where(top & (fraction == (1 << form.fraction_bits) - 1), np.nan, values)
    values = np.where(negative, -values, values)
    if form.kind == "fnuz":
        values = np.where(bits == 1 << (form.width - 1), np.nan, values)
    return values


def values_of(x: torch.Tensor) -> np.ndarray:
    """The elements of `x` as float64 (float128 would not change an end: rounding is monotone), in its shape."""
    x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if x.dtype not in FORMATS:
        return np.asarray(x.numpy()).astype(np.float64)
    raw = x.view(_BITS[x.element_size()]).numpy().view(_UNSIGNED[x.element_size()])
    return decode(x.dtype, raw)


def expected(x: torch.Tensor) -> Expected:
    """The health of `x`; its first three fields are the range."""
    if x.is_complex():
        # The modulus as torch computes it is the promise, to the last bit.
        modulus = (x if x.dtype is not torch.complex32 else x.to(torch.complex64)).detach().abs()
        parts = torch.view_as_real(x.detach().resolve_conj())
        finite = np.isfinite(parts.numpy().astype(np.float64)).all(axis=-1)
        return expected_of(values_of(modulus), FORMATS[parts.dtype].smallest_normal, finite)
    return expected_of(values_of(x), FORMATS[x.dtype].smallest_normal if x.dtype in FORMATS else 0.0)


def expected_of(values: np.ndarray, smallest_normal: float, finite: np.ndarray | None = None) -> Expected:
    size = np.abs(values)
    finite = np.isfinite(values) if finite is None else finite
    sizes = size[finite]
    has_nan = bool(np.isnan(values).any())
    bad = np.flatnonzero(~finite.reshape(-1))
    first = tuple(int(i) for i in np.unravel_index(bad[0], values.shape)) if bad.size else None
    return Expected(
        abs_min=math.nan if has_nan else float(size.min(initial=math.inf)),
        abs_max=math.nan if has_nan else float(size.max(initial=0.0)),
        isfinite=bool(finite.all()),
        finite_abs_min=float(sizes.min(initial=math.inf)),
        finite_abs_max=float(sizes.max(initial=0.0)),
        num_nan=int(np.isnan(values).sum()),
        num_posinf=int(((values == np.inf) & ~finite).sum()),
        num_neginf=int((values == -np.inf).sum()),
        num_zero=int((values == 0).sum()),
        num_subnormal=int(((size > 0) & (size < smallest_normal)).sum()),
        numel=values.size,
        first_nonfinite=first,
    )


def same(got: tuple[object, ...], want: tuple[object, ...]) -> bool:
    """Equal field by field, by type too; nan equals nan."""
    return len(got) == len(want) and all(
        type(a) is type(b) and (a == b or (a != a and b != b)) for a, b in zip(got, want, strict=True)
    )


def from_patterns(patterns: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over the memory of `patterns`, an unsigned array as wide as `dtype`."""
    return torch.from_numpy(patterns.view(f"i{patterns.itemsize}")).view(dtype)


def random_patterns(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Uniform bits: about one element in 256 of a 32-bit float is nan, and every code of a small format occurs."""
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    highest = 2 if dtype is torch.bool else 256
    size = math.prod(shape) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, highest, size, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def finite_of(x: torch.Tensor) -> torch.Tensor:
    """The same elements, those that are not finite replaced by the least positive number."""
    if not x.dtype.is_floating_point:
        return x
    bad = torch.from_numpy(~np.isfinite(values_of(x)))
    return x.view(_BITS[x.element_size()]).masked_fill(bad, 1).view(x.dtype)


def random_finite(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return finite_of(random_patterns(dtype, shape, seed))


def assert_rows(got: list[object], want: np.ndarray, what: str) -> None:
    rows = np.array([tuple(row) for row in got], dtype=np.float64)
    wrong = np.flatnonzero(~((rows == want) | (np.isnan(rows) & np.isnan(want))).all(axis=1))
    assert wrong.size == 0, f"{what}: pattern {wrong[0]:#x} gave {rows[wrong[0]]}, not {want[wrong[0]]}"
