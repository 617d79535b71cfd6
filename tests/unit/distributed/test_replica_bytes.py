"""Two sides of a tensor compared by an exchange of few messages."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nanwatch.distributed.replica_bytes import Copy, bytes_of, compare, measure, write


def both(a: Copy, b: Copy) -> tuple[list[Any], list[int]]:
    """Return what both sides find, and the sizes of the messages of one of them."""
    ways: dict[str, queue.Queue[bytes]] = {"a": queue.Queue(), "b": queue.Queue()}
    sizes: list[int] = []

    def side(own: str, other: str, copy: Copy, found: dict[str, Any]) -> None:
        def exchange(_: str, value: bytes) -> bytes | None:
            ways[other].put(value)
            if own == "a":
                sizes.append(len(value))
            return ways[own].get(timeout=10)

        found[own] = compare(copy, exchange)

    found: dict[str, Any] = {}
    threads = [
        threading.Thread(target=side, args=(*names, copy, found)) for names, copy in (("ab", a), ("ba", b))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found["a"], found["b"]], sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("numel", [1, 5000])
def test_a_flipped_bit_is_found_from_both_sides(dtype: torch.dtype, numel: int) -> None:
    """With the difference that plain torch finds, from a few blocks."""
    a = torch.arange(1, numel + 1).to(dtype)
    b = a.clone()
    b.view(torch.uint8).reshape(-1)[-1] ^= 1 << 2  # the highest byte of the last element
    (one, other), sizes = both(Copy(7, a, {}), Copy(7, b, {}))
    assert one == other
    apart, began = one
    assert began is None
    assert (apart.step, apart.num_differing, apart.numel, apart.is_all) == (7, 1, numel, True)
    assert apart.bits == (8 * dtype.itemsize - 6,)
    assert apart.largest == float((a.double() - b.double()).abs().max())
    assert sum(sizes) < 6000


def test_the_first_batch_that_differs_is_told() -> None:
    """Of the batches whose fingerprints both have kept."""
    x = torch.ones(3)
    a, b = {4: 1, 5: 2, 6: 3, 7: 9}, {5: 2, 6: 8, 7: 8, 8: 1}
    found, _ = both(Copy(9, x, a), Copy(9, x, b))
    assert [began for _, began in found] == [6, 6]
    assert found[0][0].num_differing == 0


def test_other_steps_and_sizes_are_not_compared() -> None:
    """The bits of two steps say nothing about each other."""
    x = torch.ones(3)
    for b in (Copy(8, x, {}), Copy(9, torch.ones(4), {})):
        assert [apart for apart, _ in both(Copy(9, x, {}), b)[0]] == [None, None]


def test_a_large_tensor_that_differs_everywhere_is_sent_in_part() -> None:
    """At most 1 MiB of blocks, and the number is a lower bound."""
    a = torch.zeros(1 << 19)
    (one, _), sizes = both(Copy(1, a, {}), Copy(1, a + 1, {}))
    assert (one[0].num_differing, one[0].numel, one[0].is_all) == (1 << 18, 1 << 19, False)
    assert max(sizes) == 1 << 20


def test_a_nan_has_no_distance() -> None:
    """But bits."""
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan])
    found = measure(bytes_of(a), bytes_of(b), torch.float32, 3)
    assert (found.num_differing, found.largest) == (1, None)
    assert found.bits == (22, 23, 24, 25, 26, 27, 28, 29)


def test_a_written_side_is_read_without_code(tmp_path: Path) -> None:
    """Under a name that a file system takes."""
    path = write(tmp_path / "folder", 3, "exp_avg[a/b]", torch.ones(2))
    found = torch.load(path, weights_only=True)
    assert (found["name"], found["rank"], found["tensor"].tolist()) == ("exp_avg[a/b]", 3, [1.0, 1.0])
