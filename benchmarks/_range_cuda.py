"""The range benchmark on a GPU: what the kernels take, what a call takes, and which targets are met.

Two kinds of time. Of a kernel: what the profiler read on the device, summed over all that one call enqueued, over
buffers that rotate so that none is still in L2. Of a call: from Python and back with the numbers, interleaved.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from _targets import Target
from _timing import Candidate, Plan, duration, interleave, machine, table, write_results
from torch import Tensor

import nanwatch
from nanwatch.numerics import _extension

NBYTES = (1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30)
QUICK_NBYTES = (1 << 20, 1 << 26)
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
QUICK_DTYPES = ("float32", "bfloat16")
# Several times the largest L2 of this decade: a buffer is evicted before it is read again.
ROTATION_BYTES = 512 << 20
CALLS = Plan(min_rounds=9, max_rounds=31, budget=2.0, sample=2e-4)
QUICK_CALLS = Plan(min_rounds=3, max_rounds=5, budget=0.2, sample=1e-4)


@dataclass(frozen=True, slots=True)
class CudaRow:
    """One dtype and size; seconds by candidate, of the kernels of one call and of the whole call."""

    dtype: str
    nbytes: int
    kernels: Mapping[str, float]
    calls: Mapping[str, float] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.dtype}, {size(self.nbytes)}"

    def bandwidth(self, name: str) -> float:
        """Bytes a second, each byte of the tensor counted once."""
        return self.nbytes / self.kernels[name]

    def to_json(self) -> dict[str, Any]:
        rates = {name: self.bandwidth(name) / 1e12 for name in self.kernels}
        return {**asdict(self), "terabytes_per_second": rates}


def size(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"


# ---- what is timed ----


class Floor:
    """floor_cuda.cu, built by the nvcc that is here."""

    def __init__(self, device: torch.device) -> None:
        nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
        if nvcc is None:
            raise SystemExit(
                "nvcc was not found: the floor cannot be built; do without it: --only health transformers"
            )
        properties = torch.cuda.get_device_properties(device)
        source = Path(__file__).with_name("floor_cuda.cu")
        with tempfile.TemporaryDirectory() as folder:
            library = str(Path(folder, "floor_cuda.so"))
            command = [nvcc, "-O3", "-std=c++17", "-shared", "-Xcompiler=-fPIC", str(source), "-o", library]
            command.append(f"-arch=sm_{properties.major}{properties.minor}")
            subprocess.run(command, check=True)
            self.library = ctypes.CDLL(library)
        self.blocks = 2 * properties.multi_processor_count
        self.result = torch.zeros(1, dtype=torch.int32, device=device)
        self.temporary: Tensor | None = None

    def read(self, x: Tensor) -> None:
        """xor of the words into `result`."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        data, sink = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(self.result.data_ptr())
        self._check(self.library.floor_read(data, ctypes.c_int64(x.nbytes), sink, self.blocks, stream))

    def cub(self, x: Tensor) -> None:
        """The largest word, as a signed integer, into `result`."""
        needed = ctypes.c_size_t(0)
        self._cub(x, None, needed)
        if self.temporary is None or self.temporary.nbytes < needed.value:
            self.temporary = torch.empty(needed.value, dtype=torch.uint8, device=x.device)
        self._cub(x, self.temporary.data_ptr(), needed)

    def _cub(self, x: Tensor, temporary: int | None, needed: ctypes.c_size_t) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        data, largest = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(self.result.data_ptr())
        count, place = ctypes.c_int64(x.nbytes), ctypes.c_void_p(temporary)
        self._check(self.library.floor_cub(data, count, largest, place, ctypes.byref(needed), stream))

    @staticmethod
    def _check(error: int) -> None:
        if error != 0:
            raise SystemExit(f"floor_cuda.cu: CUDA error {error}: nothing was timed")


def kernel_candidates(floor: Floor | None, only: set[str]) -> dict[str, Callable[[Tensor], object]]:
    found: dict[str, Callable[[Tensor], object]] = {"nanwatch": _extension.abs_range}
    if "health" in only:
        found["health"] = _extension.health
    if floor is not None:
        found |= {"read": floor.read, "cub": floor.cub}
    return found


def kernel_seconds(function: Callable[[Tensor], object], xs: list[Tensor], calls: int) -> float:
    """The median time of one call's kernels, as the profiler saw them on the device."""
    for x in xs[:3]:
        function(x)
    torch.cuda.synchronize()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
        for i in range(calls):
            function(xs[i % len(xs)])
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    events = [event for event in profile.events() if event.device_type == on_device]
    if not events or len(events) % calls != 0:
        raise SystemExit(f"the profiler saw {len(events)} kernels in {calls} calls: nothing was timed")
    each = len(events) // calls
    events.sort(key=lambda event: event.time_range.start)
    times = [
        sum(e.time_range.elapsed_us() for e in events[i : i + each]) for i in range(0, len(events), each)
    ]
    return statistics.median(times) * 1e-6


# ---- rows ----


def make_input(nbytes: int, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    """Normal numbers, new for each row."""
    generator = torch.Generator(device).manual_seed(seed)
    numel = nbytes // dtype.itemsize
    x = torch.empty(numel, dtype=dtype, device=device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for part in x.split(1 << 26):
        part.copy_(torch.randn(part.numel(), dtype=wide, device=device, generator=generator))
    return x


def xor_of(words: Tensor) -> float:
    """By halves, because torch has no such reduction."""
    while words.numel() > 1:
        half = (words.numel() + 1) // 2
        low, high = words[:half].clone(), words[half:]
        low[: high.numel()] ^= high
        words = low
    return words.item()


def verify(xs: Iterable[Tensor], floor: Floor | None) -> None:
    """nanwatch against float64 on the device, the floors against torch, before anything is timed."""
    for x in xs:
        low, high = float("inf"), 0.0
        largest = -(1 << 31)
        for part in x.split(1 << 26):
            wide = part.double().abs()
            low, high = min(low, wide.min().item()), max(high, wide.max().item())
            largest = max(largest, int(part.view(torch.int32).max().item()))
        for got in (
            nanwatch.abs_range(x),
            tuple(_extension.abs_range(x).tolist()),
            nanwatch.tensor_health(x)[:3],
        ):
            if tuple(got) != (low, high, True):
                raise SystemExit(
                    f"nanwatch gives {got} where {(low, high, True)} is right: nothing was timed"
                )
        if floor is not None:
            floor.cub(x)
            if floor.result.item() != largest:
                raise SystemExit("cub's maximum is not torch's: nothing was timed")
            floor.result.zero_()
            floor.read(x)
            if floor.result.item() != xor_of(x.view(torch.int32)):
                raise SystemExit("the floor's xor is not torch's: nothing was timed")


def rows(
    options: argparse.Namespace, rivals: Callable[[Tensor, set[str]], dict[str, Candidate]]
) -> Iterator[CudaRow]:
    device = torch.device("cuda", torch.cuda.current_device())
    only = set(options.only)
    floor = Floor(device) if "floor" in only else None
    for dtype in options.dtype or (QUICK_DTYPES if options.quick else DTYPES):
        for nbytes in options.sizes or (QUICK_NBYTES if options.quick else NBYTES):
            count = max(1, min(64, ROTATION_BYTES // nbytes))
            xs = [make_input(nbytes, getattr(torch, dtype), seed, device) for seed in range(count)]
            verify(xs[:2], floor)
            calls = 20 if options.quick else 200 if nbytes <= 1 << 28 else 50
            kernels = {
                name: kernel_seconds(function, xs, calls)
                for name, function in kernel_candidates(floor, only).items()
            }
            found = {"nanwatch": Candidate(nanwatch.abs_range, xs[0]), **rivals(xs[0], only - {"numpy"})}
            samples = interleave(found, QUICK_CALLS if options.quick else CALLS)
            yield CudaRow(dtype, nbytes, kernels, {name: samples.seconds(name) for name in found})


def judge(rows: Iterable[CudaRow]) -> list[Target]:
    """Every target that the rows say something about; the worst row decides. Meant for an H200."""
    rows = list(rows)
    small, large = range((1 << 20) + 1), range(1 << 26, 1 << 62)
    whole = [row for row in rows if row.nbytes == 1 << 30 and row.dtype != "float64"]

    def at_least(name: str, bound: float, values: list[tuple[float, str]]) -> list[Target]:
        if not values:
            return []
        value, where = min(values)
        return [Target(name, f">= {bound:g}", f"{value:#.3g}", value >= bound, where)]

    def times(rival: str, of: Iterable[CudaRow]) -> list[tuple[float, str]]:
        return [(row.calls[rival] / row.calls["nanwatch"], row.where) for row in of if rival in row.calls]

    health = [row for row in whole if row.dtype in ("float32", "bfloat16") and "health" in row.kernels]
    four = [(row.kernels["nanwatch"] * 1e6, row.where) for row in rows if row.nbytes == 1 << 22]
    slowest = max(four, default=None)
    return [
        *at_least("TB/s at 1 GiB", 4.15, [(row.bandwidth("nanwatch") / 1e12, row.where) for row in whole]),
        *at_least(
            "share of cub::DeviceReduce at 1 GiB",
            0.97,
            [
                (row.kernels["cub"] / row.kernels["nanwatch"], row.where)
                for row in whole
                if "cub" in row.kernels
            ],
        ),
        *at_least(
            "health, share of abs_range's bandwidth at 1 GiB",
            0.95,
            [(row.kernels["nanwatch"] / row.kernels["health"], row.where) for row in health],
        ),
        *at_least(
            "transformers' functions, times nanwatch, from 64 MiB",
            8,
            times("transformers", (row for row in rows if row.nbytes in large)),
        ),
        *at_least(
            "transformers' functions, times nanwatch, to 1 MiB",
            6,
            times("transformers", (row for row in rows if row.nbytes in small)),
        ),
        *at_least(
            "torch.compile, times nanwatch, bfloat16",
            1.5,
            times("compile", (row for row in rows if row.dtype == "bfloat16")),
        ),
        *at_least("torch.compile, times nanwatch", 1, times("compile", rows)),
        *(
            [Target("kernel of 4 MiB, us", "<= 7", f"{slowest[0]:#.3g}", slowest[0] <= 7, slowest[1])]
            if slowest
            else []
        ),
    ]


# ---- output ----


def print_results(rows: list[CudaRow]) -> None:
    kernels = [name for name in ("nanwatch", "health", "read", "cub") if name in rows[0].kernels]
    rivals = [name for name in rows[0].calls if name != "nanwatch"]
    body = []
    for row in rows:
        rates = [f"{row.bandwidth(name) / 1e12:#.3g}" for name in kernels]
        ratios = [f"{row.calls[name] / row.calls['nanwatch']:#.3g}" for name in rivals]
        times = [duration(row.kernels["nanwatch"]), duration(row.calls["nanwatch"])]
        body.append([row.dtype, size(row.nbytes), *times, *rates, *ratios])
    print("\nTB/s of kernels; rivals: time of a call / nanwatch's")
    print(table(["dtype", "size", "kernel", "call", *(f"{name} TB/s" for name in kernels), *rivals], body))
    print("\ntargets, for an H200")
    verdicts = [
        [t.name, t.wanted, t.found, "pass" if t.passed else f"MISS at {t.where}"] for t in judge(rows)
    ]
    print(table(["what", "wanted", "found", ""], verdicts))


def run(options: argparse.Namespace, rivals: Callable[[Tensor, set[str]], dict[str, Candidate]]) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no CUDA device here")
    native = nanwatch.numerics._extension.C
    if native is None or not native.cuda_compiled():
        raise SystemExit(
            f"the compiled part has no CUDA kernels: {nanwatch.numerics._extension.reason or 'built without CUDA'}"
        )
    about = machine(gpu=torch.cuda.get_device_name(), cuda=str(torch.version.cuda))
    print(", ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    done: list[CudaRow] = []
    for row in rows(options, rivals):
        done.append(row)
        print(f"[{len(done)}] {row.where}: {duration(row.kernels['nanwatch'])}", file=sys.stderr, flush=True)
    print_results(done)
    write_results(options, about, done, judge(done))
