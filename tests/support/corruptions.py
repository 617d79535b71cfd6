"""Random corruptions of a tensor, as faulty memory, kernels and code make them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

# Each takes the words of a matrix of float32, as int32, and returns others, or None where nothing would change.
Corruption = Callable[[Tensor, random.Random], Tensor | None]


def flipped_bit(words: Tensor, draw: random.Random) -> Tensor:
    x = words.clone()
    x.view(-1)[draw.randrange(x.numel())] ^= draw.choice(_BITS)
    return x


def flipped_bits(words: Tensor, draw: random.Random) -> Tensor:
    """Several different bits, so that they do not flip back."""
    x = words.clone()
    for place in draw.sample(range(x.numel()), draw.randint(2, 8)):
        x.view(-1)[place] ^= draw.choice(_BITS)
    return x


def flipped_signs(words: Tensor, draw: random.Random) -> Tensor:
    x = words.clone()
    x[draw.randrange(len(x))] ^= _BITS[31]
    return x


def swapped_elements(words: Tensor, draw: random.Random) -> Tensor | None:
    x = words.clone()
    one, other = draw.sample(range(x.numel()), 2)
    flat = x.view(-1)
    flat[[one, other]] = flat[[other, one]]
    return None if flat[one] == flat[other] else x


def filled_row(words: Tensor, draw: random.Random) -> Tensor:
    """A constant in place of a part of a row, as of a kernel that wrote nothing or nan there."""
    x = words.clone()
    start = draw.randrange(x.shape[1])
    x[draw.randrange(len(x)), start : start + draw.randint(1, 16)] = draw.choice(
        (0, 0x7FC00000, 0x3F800000, 1)
    )
    return x


def shifted_rows(words: Tensor, draw: random.Random) -> Tensor:
    return words.roll(draw.randrange(1, len(words)), 0)


def shifted_row(words: Tensor, draw: random.Random) -> Tensor:
    x = words.clone()
    row = draw.randrange(len(x))
    x[row] = x[row].roll(draw.randrange(1, x.shape[1]))
    return x


def permuted_rows(words: Tensor, draw: random.Random) -> Tensor:
    order = list(range(len(words)))
    one, other = draw.sample(order, 2)
    order[one], order[other] = other, one
    return words[order]


def transposed(words: Tensor, draw: random.Random) -> Tensor:
    """The same memory, or the same elements, under another shape."""
    return draw.choice((words.T, words.T.contiguous(), words.T.reshape(words.shape), words.reshape(-1)))


def other_dtype(words: Tensor, draw: random.Random) -> Tensor:
    return draw.choice((words, words.view(torch.int16), words.view(torch.bfloat16), words.to(torch.int64)))


_BITS = [(1 << bit) - (1 << 32 if bit == 31 else 0) for bit in range(32)]
CORRUPTIONS: tuple[Corruption, ...] = (
    *(flipped_bit, flipped_bits, flipped_signs, swapped_elements, filled_row),
    *(shifted_rows, shifted_row, permuted_rows, transposed, other_dtype),
)


def corrupted(x: Tensor, draw: random.Random) -> Iterator[tuple[str, Tensor]]:
    """Yield name and result of one random corruption after the other of a matrix of float32, without an end."""
    words = x.view(torch.int32)
    while True:
        for corrupt in CORRUPTIONS:
            y = corrupt(words, draw)
            if y is None:
                continue
            yield (
                corrupt.__name__,
                y.view(torch.float32) if y.dtype is torch.int32 and corrupt is not other_dtype else y,
            )


def missed(shape: tuple[int, int], count: int, seed: int, fingerprint: Callable[[Tensor], int]) -> list[str]:
    """The names of those of so many corruptions of a random matrix whose fingerprint is that of the matrix."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    known = fingerprint(x)
    every = islice(corrupted(x, random.Random(seed)), count)
    return [name for name, y in every if fingerprint(y) == known]
