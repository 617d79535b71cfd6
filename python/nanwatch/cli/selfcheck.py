"""Every implementation on this machine against the reference: `python -m nanwatch --selfcheck`.

A build that passes its tests on the machine that made it can still be wrong on this one: another instruction set,
another GPU, another torch. So this needs nothing but the installed library, draws tensors of every dtype with a nan and
infinities planted in places where a head, a vector body and a tail would each lose them, and wants equality.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..numerics import _extension, _ops, _reference

# 0 and 1; around 16, 64 and 512 elements, where vector bodies begin and end; 1_000_003 gives a byte-wide dtype
# enough to be split over threads, which starts at 384 KiB.
_SIZES = (0, 1, 2, 3, 15, 16, 17, 63, 65, 511, 513, 4099, 1_000_003)
_OFFSETS = (0, 1, 3)
_PLANTS = (float("nan"), float("inf"), float("-inf"))


@dataclass(frozen=True)
class Outcome:
    """One implementation and one dtype: how many tensors were compared, and what was wrong ("" when nothing was)."""

    implementation: str
    dtype: str
    cases: int
    error: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class _Case:
    what: str
    tensor: Tensor  # on the CPU
    range_row: Tensor  # (3,) float64
    health_row: Tensor  # (11,) float64
    exponents: Tensor | None  # int64; None for a complex tensor, which has none


@dataclass(frozen=True)
class _Implementation:
    name: str
    device: torch.device
    capability: str = ""  # hold the native CPU part at this level


def _values(
    dtype: torch.dtype, size: int, generator: torch.Generator, plant: float | None, where: int
) -> Tensor:
    """`size` numbers of `dtype`; a quarter are tiny, so that zeros and subnormals occur in every format."""
    if not (dtype.is_floating_point or dtype.is_complex):
        raw = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        return (raw & 1).bool() if dtype == torch.bool else raw.view(dtype)
    wide = torch.complex64 if dtype.is_complex else torch.float64 if dtype == torch.float64 else torch.float32
    values = torch.randn(size, dtype=wide, generator=generator)
    tiny = torch.rand(size, generator=generator) < 0.25
    values[tiny] *= torch.finfo(dtype).smallest_normal
    if plant is not None and size:
        values[where] = plant
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        return values.to(dtype)


def _tensors(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    planting = dtype.is_floating_point or dtype.is_complex
    for size in _SIZES:
        for offset in _OFFSETS:
            whole = _values(dtype, size + offset, generator, None, 0)
            yield f"{size} elements at offset {offset}", whole[offset:]
        # One plant in each large tensor is enough: the reference takes longer than all that is checked.
        places = sorted({0, size // 2, size - 1}) if size < 100_000 else [size - 1]
        for where in places if planting and size else []:
            for plant in _PLANTS:
                tensor = _values(dtype, size, generator, plant, where)
                yield f"{size} elements, {plant} at {where}", tensor
    grid = _values(dtype, 37 * 129, generator, None, 0).reshape(37, 129)
    yield "transposed 37x129", grid.t()
    yield "every second row and column of 37x129", grid[::2, ::2]
    yield "the first 100 of 129 columns", grid[:, :100]
    yield "expanded", grid[:1].expand(5, 129)
    yield "0-d", grid[3, 7]


def _cases(dtype: torch.dtype) -> Iterator[_Case]:
    for what, tensor in _tensors(dtype):
        exponents = None if dtype.is_complex else _reference.exponent_histogram(tensor)
        yield _Case(what, tensor, _reference.abs_range(tensor), _reference.health(tensor), exponents)


def _same(got: Tensor, expected: Tensor) -> bool:
    wide = expected.to(got.dtype)  # a device without float64 gives float32 rows
    return got.shape == wide.shape and bool(torch.equal(got.nan_to_num(nan=-7.0), wide.nan_to_num(nan=-7.0)))


def _difference(case: _Case, tensor: Tensor, public: Callable[[Tensor], tuple[float, float, bool]]) -> str:
    """What the implementation of `tensor`'s device gives other than the reference; "" when all is equal."""
    answers = {
        "abs_range": (_ops.abs_range(tensor).cpu(), case.range_row),
        "abs_ranges": (
            _ops.abs_ranges([tensor, tensor]).cpu(),
            torch.stack([case.range_row, case.range_row]),
        ),
        "health": (_ops.health(tensor).cpu(), case.health_row),
        "nanwatch.abs_range": (
            torch.tensor([float(v) for v in public(tensor)], dtype=torch.float64),
            case.range_row,
        ),
    }
    if case.exponents is not None:
        answers["exponent_histogram"] = (_ops.exponent_histogram(tensor).cpu(), case.exponents)
    for name, (got, expected) in answers.items():
        if not _same(got, expected):
            return f"{case.what}: {name} gives {got.tolist()}, the reference {expected.tolist()}"
    return ""


@contextmanager
def _held_at(capability: str) -> Iterator[None]:
    module: Any = _extension.C
    if not capability or module is None:
        yield
        return
    before = module.cpu_capability()
    module.set_cpu_capability(capability)
    try:
        yield
    finally:
        module.set_cpu_capability(before)


def devices() -> list[torch.device]:
    """The CPU and every accelerator torch can use here."""
    found = [torch.device("cpu")]
    if torch.cuda.is_available():
        found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append(torch.device("mps"))
    if torch.xpu.is_available():
        found += [torch.device("xpu", index) for index in range(torch.xpu.device_count())]
    return found


def has_kernel(device: torch.device) -> bool:
    """Whether the dispatcher has a native kernel of ours for the device's plain tensors."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
    return key is not None and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key("nanwatch::abs_range", key)
    )


def implementations() -> list[tuple[str, torch.device, str]]:
    """(name, device, CPU capability to hold or "") of every implementation this machine can run."""
    found: list[tuple[str, torch.device, str]] = []
    for device in devices():
        native = has_kernel(device)
        if native and device.type == "cpu" and _extension.C is not None:
            levels = [str(level) for level in _extension.C.cpu_capabilities()]
            found += [(f"{device} native {level}", device, level) for level in levels]
        else:
            found.append((f"{device} {'native' if native else 'torch operations'}", device, ""))
    return found


def selfcheck() -> Iterator[Outcome]:
    """Compares each implementation with the reference on the CPU, dtype by dtype; one outcome for each pair."""
    from ..numerics import ranges

    present = [_Implementation(*row) for row in implementations()]
    for dtype in sorted(_reference.READABLE_DTYPES, key=str):
        name = str(dtype).removeprefix("torch.")
        cases = list(_cases(dtype))
        for implementation in present:
            yield _check(implementation, name, cases, ranges.abs_range)


def _check(
    implementation: _Implementation,
    dtype: str,
    cases: list[_Case],
    public: Callable[[Tensor], tuple[float, float, bool]],
) -> Outcome:
    device = implementation.device
    try:
        torch.empty(1, dtype=cases[0].tensor.dtype, device=device)
    except (RuntimeError, TypeError) as error:  # a dtype that this device has not
        return Outcome(implementation.name, dtype, 0, skipped=str(error).splitlines()[0])
    with _held_at(implementation.capability):
        for number, case in enumerate(cases):
            try:
                # Moved by storage, so that offsets and strides arrive; `.to` would make a plain copy.
                moved = case.tensor if device.type == "cpu" else _moved(case.tensor, device)
                error_text = _difference(case, moved, public)
            except (
                Exception
            ) as error:  # a crash is a finding like any other, and the rest is still to be checked
                error_text = f"{case.what}: {type(error).__name__}: {error}"
            if error_text:
                return Outcome(implementation.name, dtype, number + 1, error=error_text)
    return Outcome(implementation.name, dtype, len(cases))


def _moved(x: Tensor, device: torch.device) -> Tensor:
    raw = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    storage = raw.to(device).untyped_storage()
    moved = torch.empty(0, dtype=x.dtype, device=device)
    return moved.set_(storage, x.storage_offset(), x.shape, x.stride())
