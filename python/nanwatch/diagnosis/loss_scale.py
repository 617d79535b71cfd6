"""A smaller loss scale as a cure of a bad gradient: the same backward from smaller gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, frexp, inf, isfinite, log2

from ..numerics.formats import limits
from ..report.finding import Cure
from ..report.headroom import headroom_bits
from ..report.record import Record

# One bit of room is left where it can be, as one more doubling of the loss would else be the next failure.
LEAST_ROOM = 1
# Past the range of float16 (2^-24 to 2^16) there is nothing to be gained.
_MOST = 2.0**40
_NARROW = "float16"


def try_smaller(
    backward: Callable[[float], Sequence[Record]], given: Sequence[Record], scale: float | None
) -> Cure | None:
    """The largest loss scale below the present one with which all gradients of a backward are finite.

    `backward(factor)` makes it from gradients that are so many times those of the failure, which were `given`, and
    returns a record of each gradient that came up; with 1 it has failed. `scale` is the present loss scale, None where
    nobody knows it. It is run at most 9 times. None where no float16 takes part, whose range is the reason to scale, or
    where nothing was shown; a cure that does not work where the scale is known and a scale of 1 does not help either.
    """
    if not any(one.dtype == _NARROW for one in (*given, *backward(1.0))):
        return None
    most = min(_MOST if scale is None else scale, _largest_divisor(given))
    divisor = 1.0
    while divisor < most:
        divisor = min(max(2.0, divisor**2), most)
        room = room_of(backward(1 / divisor))
        if room >= LEAST_ROOM or (divisor == most and room > -inf):
            # A backward is in proportion to what it is given, so what is to spare can be given back.
            spare = room - LEAST_ROOM if isfinite(room) else 0.0
            least = max(2.0, 2.0 ** ceil(log2(divisor) - spare))
            if least < divisor and (again := room_of(backward(1 / least))) >= LEAST_ROOM:
                divisor, room = least, again
            return Cure(_words(divisor, scale), room >= LEAST_ROOM, room if isfinite(room) else None)
    return Cure(_words(scale, scale), False) if scale is not None and most == scale > 1 else None


def _largest_divisor(given: Sequence[Record]) -> float:
    """By how much these may be divided before the largest element of one is no normal number of its format."""
    divisors = [
        one.abs_max / ends.smallest_normal
        for one in given
        if one.abs_max and (ends := limits(one.dtype)) is not None
    ]
    # Rounded down to a power of two, for a division that rounds nothing.
    return max(1.0, 2.0 ** (frexp(min(*divisors, _MOST))[1] - 1)) if divisors else 1.0


def room_of(made: Sequence[Record], dtypes: Sequence[str] = (_NARROW,)) -> float:
    """Bits between the largest gradient of these formats and the end; -inf where any gradient is not finite."""
    if any(one.isfinite is False for one in made):
        return -inf
    found = [bits for one in made if one.dtype in dtypes and (bits := headroom_bits(one)) is not None]
    return min(found, default=inf)


def _words(divisor: float, scale: float | None) -> str:
    if scale is None:
        return f"a loss scale that is {divisor:g} times smaller"
    return f"a loss scale of {scale / divisor:g} in place of {scale:g}"
