"""The number formats, declared once, and the plain results of reading a tensor. Needs no torch.

`NUMBER_FORMATS` is the declaration for Python and C++: `csrc/make_headers.py` writes `csrc/numerics/format_table.h`
from it, and `make lint` fails when that header is stale. The script runs without PyTorch, and so does this
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ldexp
from typing import Literal, NamedTuple


class Limits(NamedTuple):
    """The ends of a floating-point format: the largest finite, the smallest normal and the smallest number above 0.

    A format without subnormals has its smallest normal number twice.
    """

    largest: float
    smallest_normal: float
    smallest_subnormal: float


Kind = Literal["ieee", "fn", "fnuz", "finite", "powers", "unsigned", "signed", "bool", "complex"]
"""The meaning of a word, and with it the codes that are no finite number.

ieee: the highest exponent is inf, and nan with a fraction. fn: only the word of all ones is nan, nothing is inf.
fnuz: only the word of -0.0 is nan. finite: each word is a number, as in the elements of 4 and 6 bits that
`fit.py` has. powers: an exponent alone, without sign or zero, and all ones is nan. complex: two parts of half
the bits.
"""


class NumberFormat(NamedTuple):
    """A dtype that nanwatch reads, and how its words are numbers."""

    name: str
    """PyTorch's name, as in `torch.float16`."""
    number: int
    """The number in the C ABI and in fingerprints. Fingerprints are kept in files: no number is used twice."""
    scalar_type: str
    """Name in PyTorch's C++ enumeration `ScalarType`."""
    kind: Kind
    bits: int
    exponent_bits: int = 0
    bias: int = 0

    @property
    def is_float(self) -> bool:
        """Return whether it is a real floating-point format, which has ends."""
        return self.kind in ("ieee", "fn", "fnuz", "finite", "powers")

    @property
    def has_sign_bit(self) -> bool:
        """Return whether the highest bit of a word says only that the number is negative."""
        return self.kind in ("ieee", "fn", "fnuz", "finite")

    @property
    def fraction_bits(self) -> int:
        """Return the bits of a floating-point word below the exponent."""
        return self.bits - self.has_sign_bit - self.exponent_bits

    # Magnitude words: a word without its sign, or the magnitude of an integer. They grow with |x|, through inf to nan.

    @property
    def largest_word(self) -> int:
        """Return the highest magnitude word that is a finite number."""
        top = (1 << (self.bits - self.has_sign_bit)) - 1
        if self.kind == "ieee":
            return top - (1 << self.fraction_bits)
        return top - (self.kind in ("fn", "powers"))

    @property
    def smallest_normal_word(self) -> int:
        """Return the lowest magnitude word that is no subnormal; 0 for a format without them."""
        return 1 << self.fraction_bits if self.has_sign_bit else 0

    @property
    def smallest_word(self) -> int:
        """Return the lowest magnitude word above zero: 1, or 0 for a format that has no zero."""
        return 0 if self.kind == "powers" else 1

    def value_of(self, word: int) -> float:
        """Return the finite number of a magnitude word of a floating-point format."""
        field, fraction = divmod(word, 1 << self.fraction_bits)
        if word >= self.smallest_normal_word:
            fraction += 1 << self.fraction_bits
        return ldexp(fraction, max(field, int(self.has_sign_bit)) - self.bias - self.fraction_bits)

    @property
    def ends(self) -> Limits:
        """Return the ends of a floating-point format."""
        words = self.largest_word, self.smallest_normal_word, self.smallest_word
        return Limits(*map(self.value_of, words))


NUMBER_FORMATS = (
    NumberFormat("float64", 0, "Double", "ieee", 64, exponent_bits=11, bias=1023),
    NumberFormat("float32", 1, "Float", "ieee", 32, exponent_bits=8, bias=127),
    NumberFormat("float16", 2, "Half", "ieee", 16, exponent_bits=5, bias=15),
    NumberFormat("bfloat16", 3, "BFloat16", "ieee", 16, exponent_bits=8, bias=127),
    NumberFormat("float8_e4m3fn", 4, "Float8_e4m3fn", "fn", 8, exponent_bits=4, bias=7),
    NumberFormat("float8_e5m2", 5, "Float8_e5m2", "ieee", 8, exponent_bits=5, bias=15),
    NumberFormat("float8_e4m3fnuz", 6, "Float8_e4m3fnuz", "fnuz", 8, exponent_bits=4, bias=8),
    NumberFormat("float8_e5m2fnuz", 7, "Float8_e5m2fnuz", "fnuz", 8, exponent_bits=5, bias=16),
    NumberFormat("float8_e8m0fnu", 8, "Float8_e8m0fnu", "powers", 8, exponent_bits=8, bias=127),
    NumberFormat("bool", 9, "Bool", "bool", 8),
    NumberFormat("uint8", 10, "Byte", "unsigned", 8),
    NumberFormat("int8", 11, "Char", "signed", 8),
    NumberFormat("uint16", 12, "UInt16", "unsigned", 16),
    NumberFormat("int16", 13, "Short", "signed", 16),
    NumberFormat("uint32", 14, "UInt32", "unsigned", 32),
    NumberFormat("int32", 15, "Int", "signed", 32),
    NumberFormat("uint64", 16, "UInt64", "unsigned", 64),
    NumberFormat("int64", 17, "Long", "signed", 64),
    NumberFormat("complex32", 18, "ComplexHalf", "complex", 32),
    NumberFormat("complex64", 19, "ComplexFloat", "complex", 64),
    NumberFormat("complex128", 20, "ComplexDouble", "complex", 128),
)

BY_NAME: Mapping[str, NumberFormat] = {form.name: form for form in NUMBER_FORMATS}
# The modulus of a complex number is bounded by what its parts can hold, to half a bit.
_PARTS = {form.name: f"float{form.bits // 2}" for form in NUMBER_FORMATS if form.kind == "complex"}
_LIMITS = {form.name: form.ends for form in NUMBER_FORMATS if form.is_float}
_LIMITS |= {name: _LIMITS[part] for name, part in _PARTS.items()}


def limits(dtype_name: str) -> Limits | None:
    """Return the limits of a format ("float16"; of its parts for "complex64"); None if it cannot overflow."""
    return _LIMITS.get(dtype_name)


class AbsRange(NamedTuple):
    """Smallest and largest |x| of a tensor, and whether every element is finite.

    Examples:
        >>> import nanwatch, torch
        >>> low, high, is_finite = nanwatch.abs_range(torch.tensor([2.0, torch.nan]))
        >>> low, high, is_finite
        (nan, nan, False)
    """

    abs_min: float
    abs_max: float
    isfinite: bool


class TensorHealth(NamedTuple):
    """Range of a tensor, and the number of its elements of each kind.

    Examples:
        >>> import nanwatch, torch
        >>> health = nanwatch.tensor_health(torch.tensor([0.0, 1e-40, torch.inf, 3.0]))
        >>> health.numel, health.num_zero, health.num_subnormal, health.num_posinf, health.num_nan
        (4, 1, 1, 1, 0)
    """

    abs_min: float
    abs_max: float
    isfinite: bool
    finite_abs_min: float
    """Over the finite elements only; inf when there are none."""
    finite_abs_max: float
    """Over the finite elements only; 0.0 when there are none."""
    num_nan: int
    num_posinf: int
    num_neginf: int
    num_zero: int
    """Zeros of either sign, and elements that a sparse layout does not store."""
    num_subnormal: int
    """Nonzero elements below the smallest normal number of the tensor's own dtype."""
    numel: int
    first_nonfinite: tuple[int, ...] | None
    """Index of the first nan or inf in C order; None when all is finite. Nested: its number among all elements."""
