"""What nanwatch costs on a GPU: bandwidth of the range, steps of Llamas in bfloat16, and where the host waits.

    python benchmarks/bench_gpu.py --json gpu.json             all parts
    python benchmarks/bench_gpu.py --parts range decode        some of: range, train, decode, compile
    python benchmarks/bench_gpu.py --rehearse                  tiny sizes on the CPU: shows that it runs

range: the time of kernels as the profiler reads it on the device, over buffers that rotate so that none is in L2.
nanwatch, the fastest plain read that we know (floor_cuda.cu), CUB's reduction, and torch.amax of the same bytes.
train, decode, compile: seconds of a step until the device has done it, in rounds over all ways; a ratio is taken within
a round, and its median counts. The profiler counts how often the host waits in a step and sums our kernels' time.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import random
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _steps import llama_of, tokens
from _timing import machine, write_json
from torch import Tensor, nn

import nanwatch
from nanwatch.numerics import _extension

Row = dict[str, Any]
Step = Callable[[], object]

PARTS = ("range", "train", "decode", "compile")
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
NBYTES = tuple(1 << power for power in (10, 14, 18, 20, 22, 24, 26, 28, 30, 32))
# Several times the L2 of an H200: a buffer is evicted before it is read again.
ROTATION_BYTES = 512 << 20
# The options of watch in each way. The way `transformers` uses a class of transformers.
OPTIONS: Row = {"watch": {}, "outputs": {"read": "outputs"}, "every16": {"every": 16}}
OPTIONS |= {"gradients": {"gradients": True}, "no-gradients": {"gradients": False}}
wait: Step = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
WAITS = {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}


# ---- bandwidth ----


class Floor:
    """The reads of floor_cuda.cu, built by the nvcc that is here."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(0)
        source = Path(__file__).with_name("floor_cuda.cu")
        with tempfile.TemporaryDirectory() as folder:
            library = str(Path(folder, "floor_cuda.so"))
            command = ["nvcc", "-O3", "-std=c++17", "-shared", "-Xcompiler=-fPIC", str(source), "-o", library]
            subprocess.run([*command, f"-arch=sm_{properties.major}{properties.minor}"], check=True)
            self._library = ctypes.CDLL(library)
        self._blocks = 2 * properties.multi_processor_count
        self._result = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._temporary = torch.empty(1 << 22, dtype=torch.uint8, device="cuda")

    def read(self, x: Tensor) -> None:
        """Fold the words with xor."""
        sink = ctypes.c_void_p(self._result.data_ptr())
        data, nbytes = ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.nbytes)
        self._check(self._library.floor_read(data, nbytes, sink, self._blocks, stream()))

    def cub(self, x: Tensor) -> None:
        """Take the largest word."""
        size = ctypes.c_size_t(self._temporary.nbytes)
        data, nbytes = ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.nbytes)
        sink, memory = ctypes.c_void_p(self._result.data_ptr()), ctypes.c_void_p(self._temporary.data_ptr())
        self._check(self._library.floor_cub(data, nbytes, sink, memory, ctypes.byref(size), stream()))

    @staticmethod
    def _check(error: int) -> None:
        if error != 0:
            raise SystemExit(f"floor_cuda.cu: CUDA error {error}: nothing was timed")


def stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def kernel_seconds(function: Callable[[Tensor], object], xs: list[Tensor], calls: int) -> float:
    """Return the median over calls of the summed time of a call's kernels on the device."""
    for x in xs[:3]:
        function(x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(calls):
            function(xs[i % len(xs)])
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not events or len(events) % calls != 0:
        raise SystemExit(f"the profiler saw {len(events)} kernels in {calls} calls: nothing was timed")
    events.sort(key=lambda event: event.time_range.start)
    each = len(events) // calls
    times = [
        sum(e.time_range.elapsed_us() for e in events[i : i + each]) for i in range(0, len(events), each)
    ]
    return statistics.median(times) * 1e-6


def call_seconds(function: Callable[[], object]) -> float:
    """Return the median time of a call from Python that waits for its numbers."""
    times = []
    for _ in range(30):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def verify(x: Tensor) -> None:
    """Compare a range with plain torch in float64, by parts, before anything is timed."""
    low, high = float("inf"), 0.0
    for part in x.split(1 << 26):
        wide = part.double().abs()
        low, high = min(low, wide.min().item()), max(high, wide.max().item())
    if nanwatch.abs_range(x) != (low, high, True):
        raise SystemExit(f"abs_range gives {nanwatch.abs_range(x)} where {(low, high)} is right")


def naive(x: Tensor) -> tuple[float, float, bool]:
    """The three reductions that a user writes."""
    wide = x.float() if x.itemsize == 1 else x
    magnitude = wide.abs()
    return magnitude.min().item(), magnitude.max().item(), bool(torch.isfinite(wide).all().item())


def range_rows(rehearse: bool) -> Iterator[Row]:
    if rehearse:
        return
    floor = Floor()
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        pool = torch.empty(NBYTES[-1] // kind.itemsize, dtype=kind, device="cuda")
        for part in pool.split(1 << 27):
            part.copy_(torch.randn(part.numel(), device="cuda"))
        for nbytes in NBYTES:
            count = max(1, min(64, ROTATION_BYTES // nbytes, pool.nbytes // nbytes))
            xs = list(pool[: count * nbytes // kind.itemsize].chunk(count))
            verify(xs[0])
            reads: dict[str, Callable[[Tensor], object]] = {
                "nanwatch": _extension.abs_range,
                "read": floor.read,
                "cub": floor.cub,
            }
            if kind.itemsize > 1:
                reads["amax"] = torch.amax
            calls = 60 if nbytes <= 1 << 28 else 15
            seconds = {name: kernel_seconds(read, xs, calls) for name, read in reads.items()}
            row: Row = {"part": "range", "dtype": dtype, "nbytes": nbytes, "kernel_s": seconds}
            row["tb_per_s"] = {name: nbytes / value / 1e12 for name, value in seconds.items()}
            row["of_fastest"] = min(seconds.values()) / seconds["nanwatch"]
            if nbytes <= 1 << 30:
                ways = {"nanwatch": nanwatch.abs_range, "naive": naive}
                row["call_s"] = {name: call_seconds(partial(way, xs[0])) for name, way in ways.items()}
            yield row
        del pool, xs
        torch.cuda.empty_cache()


# ---- steps ----


def rounds(steps: dict[str, Step], slow: set[str], count: int) -> dict[str, list[float]]:
    """Time each step in each round, in a new order; what is far from 1 in the first three only."""
    order, shuffle = list(steps), random.Random(0).shuffle
    for step in steps.values():
        step(), step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(count):
        shuffle(order)
        for name in order:
            if name in slow and done >= 3:
                continue
            wait()
            begun = time.perf_counter()
            steps[name]()
            wait()
            times[name].append(time.perf_counter() - begun)
    return times


def profiled(step: Step) -> Row:
    """Count the host's waits and its calls of CUDA in a step; sum their seconds, and those of our kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    kernels = [event for event in profile.events() if "range_kernel" in event.name]
    seconds = sum(event.time_range.elapsed_us() for event in kernels) * 1e-6
    host: dict[str, list[float]] = {}  # a call of the CUDA runtime or driver: how often, seconds in all
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CPU and re.match("cu(da)?[A-Z]", event.name):
            calls = host.setdefault(event.name, [0, 0.0])
            calls[0] += 1
            calls[1] += event.time_range.elapsed_us() * 1e-6
    return {"waits": sum(host[name][0] for name in WAITS & set(host)), "kernel_s": seconds, "host": host}


def llama(rehearse: bool, layers: int = 16, width: int = 2048, inner: int = 8192) -> nn.Module:
    """Sizes of Llama 3.2 1B, random weights in bfloat16."""
    torch.manual_seed(0)
    if rehearse:
        return llama_of(64, 128, layers=2, heads=4, vocabulary=32000).bfloat16()
    sizes = {"layers": layers, "heads": 32, "vocabulary": 128256, "num_key_value_heads": 8}
    with torch.device("cuda"):
        return llama_of(width, inner, **sizes).bfloat16()


def training(model: nn.Module, called: Any, rehearse: bool, shape: tuple[int, int] = (4, 1024)) -> Step:
    ids = tokens(*((1, 16) if rehearse else shape)).to(next(model.parameters()).device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        called(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    return step


def decode(model: nn.Module, called: Callable[..., Any]) -> Step:
    """One token after 64 and those of earlier steps, in a cache of fixed size."""
    from transformers import StaticCache

    ids = torch.full((1, 64), 7, device=next(model.parameters()).device)
    token = ids[:, :1].clone()
    cache = StaticCache(config=model.config, max_cache_len=1024)  # one place more a step  # type: ignore[arg-type]
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)

    def step() -> object:
        with torch.no_grad():
            return called(input_ids=token, past_key_values=cache, use_cache=True)

    return step


def watched_steps(
    base: nn.Module, make: Callable[[nn.Module], Step], ways: tuple[str, ...]
) -> dict[str, Step]:
    """The same step on copies of the model, each watched in its way."""
    from transformers.debug_utils import DebugUnderflowOverflow

    steps: dict[str, Step] = {}
    for way in ("plain", *ways):
        model = base if way == "plain" else copy.deepcopy(base)
        steps[way] = make(model)
        if way == "transformers":
            DebugUnderflowOverflow(model)
        elif way != "plain":
            nanwatch.watch(model, **OPTIONS[way])
    return steps


def row_of(name: str, steps: dict[str, Step], count: int) -> Row:
    times = rounds(steps, {"transformers"}, count)
    plain = times.pop("plain")
    row: Row = {"part": name, "plain_s": statistics.median(plain), "rounds": len(plain)}
    pairs = {way: zip(seconds, plain, strict=False) for way, seconds in times.items()}
    row["ratio"] = {way: statistics.median(a / b for a, b in pairs[way]) for way in pairs}
    if torch.cuda.is_available():
        row["profile"] = {way: profiled(step) for way, step in steps.items() if way != "transformers"}
    return row


def train_rows(rehearse: bool) -> Iterator[Row]:
    """A 1B Llama; and of an 8B one eight layers, whose share is that of 32."""
    model = llama(rehearse).train()
    steps = watched_steps(model, lambda m: training(m, m, rehearse), (*OPTIONS, "transformers"))
    yield row_of("train", steps, 3 if rehearse else 25)
    del model, steps
    model = llama(rehearse, layers=8, width=4096, inner=14336).train()
    steps = watched_steps(model, lambda m: training(m, m, rehearse, (2, 4096)), ("watch", "outputs"))
    yield row_of("train 8B", steps, 3 if rehearse else 12)


def decode_rows(rehearse: bool) -> Iterator[Row]:
    model = llama(rehearse).eval()
    steps = watched_steps(model, lambda m: decode(m, m), ("watch", "outputs", "every16", "transformers"))
    yield row_of("decode", steps, 3 if rehearse else 60)


def compile_rows(rehearse: bool) -> Iterator[Row]:
    """Four layers: what a layer costs is the same in sixteen, and these compile in a quarter of the time."""
    for name, make in (("decode", decode), ("train", training)):

        def compiled(model: nn.Module, make: Any = make) -> Step:
            called = torch.compile(model, backend="eager" if rehearse else "inductor")
            return make(model, called) if make is decode else make(model, called, rehearse)

        model = llama(rehearse, layers=4).train(make is training)
        steps = watched_steps(model, compiled, ("watch",))
        yield row_of(f"compiled {name}", steps, 3 if rehearse else 40)
        torch._dynamo.reset()


def told(row: Row) -> str:
    if row["part"] == "range":
        rates = "  ".join(f"{name} {rate:.3f}" for name, rate in row["tb_per_s"].items())
        calls = "  ".join(f"{name} {value * 1e6:.1f} us" for name, value in row.get("call_s", {}).items())
        return f"{row['dtype']:14} {row['nbytes']:>10}  TB/s {rates}  of fastest {row['of_fastest']:.3f}  call: {calls}"
    values = "  ".join(f"{name} {value:.4f}" for name, value in row["ratio"].items())
    return f"{row['part']:16} plain {row['plain_s'] * 1e3:.3f} ms  {values}  {row.get('profile', '')}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, no result")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("bench_gpu.py: torch sees no CUDA device here; --rehearse shows that it runs")
    about = machine(gpu="none" if options.rehearse else torch.cuda.get_device_name())
    rows: list[Row] = []
    makers = {"range": range_rows, "train": train_rows, "decode": decode_rows, "compile": compile_rows}
    for part in options.parts:
        for row in makers[part](options.rehearse):
            rows.append(row)
            print(told(row), flush=True)
            if options.json:
                write_json(options.json, {"machine": about, "rows": rows})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
