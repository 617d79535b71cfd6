"""Random corruptions of a tensor, as faulty memory, kernels and code make them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor

# Each takes the words of a matrix of float32 and returns others, or None where nothing would change. In numpy, whose
# operations on small arrays take a tenth of the time of torch's.
Words = np.ndarray
Corruption = Callable[[Words, random.Random], "Words | Tensor | None"]


def flipped_bit(words: Words, draw: random.Random) -> Words:
    x = words.copy()
    x.reshape(-1)[draw.randrange(x.size)] ^= draw.choice(_BITS)
    return x


def flipped_bits(words: Words, draw: random.Random) -> Words:
    """Several different bits, so that they do not flip back."""
    x = words.copy()
    for place in draw.sample(range(x.size), draw.randint(2, 8)):
        x.reshape(-1)[place] ^= draw.choice(_BITS)
    return x


def flipped_signs(words: Words, draw: random.Random) -> Words:
    x = words.copy()
    x[draw.randrange(len(x))] ^= _BITS[31]
    return x


def swapped_elements(words: Words, draw: random.Random) -> Words | None:
    x = words.copy()
    one, other = draw.sample(range(x.size), 2)
    flat = x.reshape(-1)
    flat[[one, other]] = flat[[other, one]]
    return None if flat[one] == flat[other] else x


def filled_row(words: Words, draw: random.Random) -> Words:
    """A constant in place of a part of a row, as of a kernel that wrote nothing or nan there."""
    x = words.copy()
    start = draw.randrange(x.shape[1])
    x[draw.randrange(len(x)), start : start + draw.randint(1, 16)] = draw.choice(
        (0, 0x7FC00000, 0x3F800000, 1)
    )
    return x


def shifted_rows(words: Words, draw: random.Random) -> Words:
    by = draw.randrange(1, len(words))
    return np.concatenate((words[-by:], words[:-by]))


def shifted_row(words: Words, draw: random.Random) -> Words:
    x = words.copy()
    row, by = draw.randrange(len(x)), draw.randrange(1, x.shape[1])
    x[row, by:], x[row, :by] = words[row, :-by], words[row, -by:]
    return x


def permuted_rows(words: Words, draw: random.Random) -> Words:
    one, other = draw.sample(range(len(words)), 2)
    x = words.copy()
    x[one], x[other] = words[other], words[one]
    return x


def transposed(words: Words, draw: random.Random) -> Words:
    """The same memory, or the same elements, under another shape."""
    turned = np.ascontiguousarray(words.T)
    return draw.choice((words.T, turned, turned.reshape(words.shape), words.reshape(-1)))


def other_dtype(words: Words, draw: random.Random) -> Tensor:
    x = torch.from_numpy(words)
    return draw.choice((x, x.view(torch.int16), x.view(torch.bfloat16), x.to(torch.int64)))


_BITS = [(1 << bit) - (1 << 32 if bit == 31 else 0) for bit in range(32)]
CORRUPTIONS: tuple[Corruption, ...] = (
    *(flipped_bit, flipped_bits, flipped_signs, swapped_elements, filled_row),
    *(shifted_rows, shifted_row, permuted_rows, transposed, other_dtype),
)


def corrupted(x: Tensor, draw: random.Random) -> Iterator[tuple[str, Tensor]]:
    """Yield name and result of one random corruption after the other of a matrix of float32, without an end."""
    words = x.view(torch.int32).numpy()
    while True:
        for corrupt in CORRUPTIONS:
            y = corrupt(words, draw)
            if y is not None:
                yield corrupt.__name__, y if torch.is_tensor(y) else torch.from_numpy(y.view(np.float32))


def missed(shape: tuple[int, int], count: int, seed: int, fingerprint: Callable[[Tensor], int]) -> list[str]:
    """The names of those of so many corruptions of a random matrix whose fingerprint is that of the matrix."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    known = fingerprint(x)
    every = islice(corrupted(x, random.Random(seed)), count)
    return [name for name, y in every if fingerprint(y) == known]
