"""Facts that only a GPU can show of the kernel: every dtype, size and view, streams, threads, captures, waits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.numerics import _extension, _reference
from nanwatch.numerics.formats import AbsRange
from support.cuda_emulation import FORMATS, reference, same
from support.oracle import random_finite, random_patterns
from support.recorders import WAITS, needs_cuda

pytestmark = needs_cuda


@pytest.mark.parametrize("dtype", sorted(_reference.FORMATS, key=str), ids=str)
def test_any_bits_of_any_dtype(dtype: torch.dtype) -> None:
    """Rows made on the GPU equal the reference's rows of the same bits on the CPU, at any size and alignment."""
    for count in (0, 1, 17, 4097, 1_000_001):
        if dtype.is_complex:
            # Its modulus is rounded by each device's own hypot: plain numbers, and a tolerance.
            x = torch.randn(max(count, 1), dtype=torch.complex64).to(dtype)
            row = _extension.abs_range(x.cuda()).cpu()
            assert torch.allclose(row, _reference.abs_range(x), rtol=1e-6, atol=0)
            continue
        x = random_patterns(dtype, (count,))
        on_gpu = x.cuda()
        for start in (0, 1, 3):
            assert same(_extension.abs_range(on_gpu[start:]), _reference.abs_range(x[start:]))


@pytest.mark.parametrize("dtype", [d for d in _reference.FORMATS if d.itemsize <= 2], ids=str)
def test_every_pattern_of_8_and_16_bits(dtype: torch.dtype) -> None:
    """Each pattern as a tensor of its own, in launches of many tensors."""
    count = 2 if dtype == torch.bool else 1 << 8 * dtype.itemsize
    bits = torch.arange(count).to(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    words = bits.bool() if dtype == torch.bool else bits.view(dtype)
    rows = _extension.abs_ranges(list(words.cuda().view(-1, 1)))
    assert same(rows, reference(list(words.view(-1, 1))))


def test_many_tensors_of_many_dtypes() -> None:
    """One call over more tensors than a launch takes, of mixed dtypes, keeps every row in its place."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float8_e4m3fn]
    xs = [random_patterns(dtypes[i % 5], (i % 300,), seed=i) for i in range(1200)] + [torch.tensor([3 + 4j])]
    assert same(_extension.abs_ranges([x.cuda() for x in xs]), reference(xs))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "columns": lambda x: x[:, :7],
    "steps": lambda x: x[::2, ::3],
    "expanded": lambda x: x[:1].expand(50, -1),
    "offset": lambda x: x.flatten()[1:],
    "overlapping": lambda x: torch.as_strided(x, (500, 20), (3, 1)),
    "negative": torch._neg_view,
    "permuted": lambda x: x.view(4, 16, 5, 13).permute(2, 0, 3, 1),
    "many dimensions": lambda x: torch.as_strided(x, (1, 2) * 9, (1, 3) * 9),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    """Views give what their copy gives."""
    x = random_patterns(torch.float32, (64, 65))
    assert same(_extension.abs_range(VIEWS[name](x.cuda())), _reference.abs_range(VIEWS[name](x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_all_blocks_meet_every_time(dtype: torch.dtype) -> None:
    """The last of many blocks writes the row and leaves the workspace zero, a thousand times in a row."""
    x = torch.full((3_000_001,), 2.0, device="cuda").to(dtype)
    bits = x.view(torch.uint8 if dtype.itemsize == 1 else dtype)
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, x.numel(), (1000,), generator=generator).tolist()
    low, high = torch.ones((), device="cuda").to(dtype).view(bits.dtype), bits[0].clone()
    rows = []
    for position in positions:
        bits[position] = low
        rows.append(_extension.abs_range(x))
        bits[position] = high
    assert torch.stack(rows).tolist() == [[1.0, 2.0, 1.0]] * len(positions)


def test_streams_do_not_meet() -> None:
    """Calls that run at the same time on many streams, more than there are kept workspaces, give each its own row."""
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1) for _ in range(40)]
    xs = [torch.full((500_000,), float(i + 1), device="cuda") for i in range(len(streams))]
    torch.cuda.synchronize()
    for _ in range(5):
        rows = []
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                rows.append(_extension.abs_range(x))
        torch.cuda.synchronize()
        assert [row.tolist() for row in rows] == [[i + 1.0, i + 1.0, 1.0] for i in range(len(streams))]


def test_the_current_stream_is_used() -> None:
    """A range asked for on a side stream sees what that stream wrote before, with no synchronisation between."""
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 24, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # long enough that a read on another stream would come first
        x.fill_(5)
        row = _extension.abs_range(x)
    stream.synchronize()
    assert row.tolist() == [5, 5, 1]


def test_threads_wait_for_their_own_rows() -> None:
    """Threads that ask at the same time get the numbers of their own tensors."""

    def ask(i: int) -> list[AbsRange]:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.full((100_000,), float(i), device="cuda")
            return [nanwatch.abs_range(x) for _ in range(200)]

    with ThreadPoolExecutor(8) as pool:
        for i, answers in enumerate(pool.map(ask, range(1, 9)), start=1):
            assert answers == [(i, i, True)] * 200


def test_a_range_is_one_launch_and_one_wait() -> None:
    """One kernel, one copy of three numbers, and one wait; the operator itself waits for nothing."""
    x = torch.ones(1 << 20, device="cuda")
    assert nanwatch.abs_range(x) == (1, 1, True)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as empty:
        pass
    with torch.profiler.profile(activities=activities) as profile:
        nanwatch.abs_range(x)
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("range_kernel" in name for name in on_device) == 1, on_device
    assert len([name for name in on_device if "Memcpy" not in name]) == 1, on_device
    waits, of_profiler = (sum(e.name in WAITS for e in p.events()) for p in (profile, empty))
    assert waits - of_profiler <= 1
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _extension.abs_range(x)
        _extension.abs_ranges([x, x[::2]])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_capture_has_workspaces_of_its_own() -> None:
    """The synchronous call is refused; captured operators have rows of their own, in replays beside other calls too."""
    x, y = torch.full((5_000_000,), 4.0, device="cuda"), torch.full((5_000_000,), 9.0, device="cuda")
    side = torch.cuda.Stream()
    _extension.abs_range(x)  # loads the kernel outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"torch\.ops\.nanwatch\.abs_range"):
            nanwatch.abs_range(x)
        rows = [_extension.abs_range(x) for _ in range(5)]
        strided = _extension.abs_ranges([y, y.view(1000, 5000)[:, ::2]])
    torch.cuda.synchronize()
    for value in range(1, 20):
        x.fill_(value)
        graph.replay()
        with torch.cuda.stream(side):
            others = [_extension.abs_range(y) for _ in range(5)]
        torch.cuda.synchronize()
        assert [row.tolist() for row in rows] == [[value, value, 1]] * 5
        assert [row.tolist() for row in others] == [[9, 9, 1]] * 5
        assert strided.tolist() == [[9, 9, 1]] * 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_every_device() -> None:
    """A tensor on another device than the current one is read there, and the current device stays."""
    current = torch.cuda.current_device()
    for index in range(torch.cuda.device_count()):
        row = _extension.abs_range(torch.full((10,), float(index), device=f"cuda:{index}"))
        assert row.device.index == index
        assert row.tolist() == [index, index, 1]
    assert torch.cuda.current_device() == current
    with pytest.raises(ValueError, match="device"):
        _extension.abs_ranges([torch.ones(1, device="cuda:0"), torch.ones(1, device="cuda:1")])


def test_more_than_two_to_the_31_elements() -> None:
    """Sizes and positions are 64-bit."""
    count = (1 << 31) + 12_345
    if torch.cuda.mem_get_info()[0] < 3 * count:
        pytest.skip("less than 6.5 GB of GPU memory is free")
    x = torch.ones(count, dtype=torch.float8_e5m2, device="cuda")
    x.view(torch.uint8)[-1] = 0x7C  # inf
    assert _extension.abs_range(x).tolist() == [1, float("inf"), 0]
    assert _extension.abs_range(x[:-1]).tolist() == [1, 1, 1]
    assert _extension.abs_range(x[(count - 1) % 2 :: 2]).tolist() == [1, float("inf"), 0]


# Every way of reading, small enough for compute-sanitizer: `make sanitize` runs these.


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_small_runs(dtype: torch.dtype) -> None:
    """Heads, bodies and tails of one block and of several, alone and many in a launch."""
    xs = [
        fill(dtype, (count,))[start:]
        for fill in (random_patterns, random_finite)
        for count, start in ((0, 0), (5, 0), (40_003, 0), (300_003, 1))
    ]
    expected = reference(xs)
    on_gpu = [x.cuda() for x in xs]
    assert same(_extension.abs_ranges(on_gpu), expected)
    assert same(torch.stack([_extension.abs_range(x) for x in on_gpu]), expected)
    many = (on_gpu * 65)[:514]
    assert same(_extension.abs_ranges(many), torch.cat([expected] * 65)[:514])


def test_small_frames() -> None:
    """Frames of finite, masked and failing tensors: rows in host memory, and what is examined more closely."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    with nanwatch.watch(model, on_nonfinite="record", rerun=False) as watch, torch.no_grad():
        for value in (1.0, float("inf"), float("nan"), -torch.finfo(torch.float32).max):
            x = torch.zeros(300, 64, device="cuda")
            x[7, 9] = value
            model(x)
    assert watch.report().finding is not None
