"""Implementations of the range functions: the reference, each native level, CUDA."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch

from nanwatch.numerics import _extension, _reference, ranges

NATIVE_LEVELS = ("baseline", "avx2", "avx512")


IMPLEMENTATIONS = ("reference", *(f"native-{level}" for level in NATIVE_LEVELS), "cuda")


@dataclass(frozen=True)
class Implementation:
    """The public functions as one implementation serves them."""

    name: str
    abs_range: Callable[[torch.Tensor], ranges.AbsRange]
    abs_ranges: Callable[[Sequence[torch.Tensor]], list[ranges.AbsRange]]
    tensor_health: Callable[[torch.Tensor], ranges.TensorHealth]
    device: str = "cpu"

    @property
    def is_native(self) -> bool:
        return self.name.startswith("native")

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """`x` where this implementation reads it, with the same strides, offset and overlaps."""
        return placed(x, self.device)


Place = Callable[[torch.Tensor], torch.Tensor]


def placed(x: torch.Tensor, device: str) -> torch.Tensor:
    """`x` on a device, with the same strides, offset and overlaps."""
    if device == "cpu" or x.layout is not torch.strided:
        return x.to(device)
    moved = torch.empty(0, dtype=x.dtype, device=device)
    plain = x.resolve_conj().resolve_neg()
    storage = plain.detach().untyped_storage().to(device=torch.device(device))
    return moved.set_(storage, plain.storage_offset(), plain.shape, plain.stride())


def missing(name: str) -> str:
    """Why the implementation cannot run here; "" when it can."""
    if name == "reference":
        return ""
    if name == "cuda":
        return "" if torch.cuda.is_available() else "no CUDA device"
    if _extension.C is None:
        return f"no compiled part: {_extension.reason}"
    level = name.removeprefix("native-")
    return "" if level in _extension.C.cpu_capabilities() else f"this CPU has no {level}"


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch and nanwatch have so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def active(name: str) -> Iterator[Implementation]:
    """The implementation, held in force inside the block and put back after it."""
    if name == "reference":
        functions = {name: getattr(_reference, name) for name in ("abs_range", "abs_ranges", "health")}
        with mock.patch.multiple(_extension, C=None, **functions):
            yield Implementation(name, ranges._abs_range, ranges.abs_ranges, ranges.tensor_health)
        return
    native = _extension.C
    if name == "cuda" or native is None:
        yield Implementation(name, ranges.abs_range, ranges.abs_ranges, ranges.tensor_health, "cuda")
        return
    before = native.cpu_capability()
    native.set_cpu_capability(name.removeprefix("native-"))
    try:
        yield Implementation(name, ranges.abs_range, ranges.abs_ranges, ranges.tensor_health)
    finally:
        native.set_cpu_capability(before)
