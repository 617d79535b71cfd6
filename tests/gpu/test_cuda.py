"""Facts about the CUDA kernels that only a GPU can show, and the answers of the compiled CUDA part without one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import nanwatch
from nanwatch.numerics import _extension, _fingerprint, _reference, _spread


def _missing() -> str:
    """Why the CUDA kernels cannot be tested here, or "" if they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if _extension.C is None:
        return f"the compiled part is missing: {_extension.reason}"
    return "" if _extension.C.cuda_compiled() else "the compiled part was built without CUDA"


@pytest.fixture
def cuda() -> torch.device:
    if reason := _missing():
        pytest.skip(reason)
    return torch.device("cuda", torch.cuda.current_device())


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal element for element on the host, a nan equal to a nan."""
    return torch.allclose(got.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)


def any_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    high = 2 if dtype == torch.bool else 256
    words = torch.randint(0, high, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return words.view(dtype)


def every_row(xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([_reference.abs_range(x) for x in xs])


@pytest.mark.parametrize(
    "dtype",
    sorted(_reference.READABLE_DTYPES, key=str),
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
@pytest.mark.parametrize("count", [0, 1, 17, 4097, 300_001])
def test_any_bits_of_any_dtype(cuda: torch.device, dtype: torch.dtype, count: int) -> None:
    """Rows made on the GPU equal the reference's rows of the same bits on the CPU."""
    if dtype.is_complex:  # its modulus is rounded by each device's own hypot: plain numbers, and a tolerance
        x = torch.randn(max(count, 1), dtype=torch.complex64).to(dtype)
        assert torch.allclose(
            _extension.abs_range(x.to(cuda)).cpu(), _reference.abs_range(x), rtol=1e-6, atol=0
        )
        return
    x = any_bits(dtype, count)
    on_gpu = x.to(cuda)
    assert same(_extension.abs_range(on_gpu), _reference.abs_range(x))
    assert same(_extension.health(on_gpu), _reference.health(x))


def test_many_tensors_many_dtypes(cuda: torch.device) -> None:
    """One call over more tensors than a launch takes, of mixed dtypes, keeps every row in its place."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float8_e4m3fn, torch.complex64]
    xs = [any_bits(dtypes[i % 5], i % 300) for i in range(2500)] + [torch.tensor([3 + 4j])]
    assert same(_extension.abs_ranges([x.to(cuda) for x in xs]), every_row(xs))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, :7],
        lambda x: x[::2, ::3],
        lambda x: x[:1].expand(50, -1),
        lambda x: x.flatten()[1:],
        lambda x: torch.as_strided(x, (500, 20), (3, 1)),
        lambda x: torch._neg_view(x),
    ],
    ids=["transposed", "columns", "steps", "expanded", "offset", "overlapping", "negative"],
)
def test_views(cuda: torch.device, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Views are read in place and give what their copy gives."""
    x = any_bits(torch.float32, 64 * 65).view(64, 65)
    on_gpu = view(x.to(cuda))
    assert same(_extension.abs_range(on_gpu), _reference.abs_range(view(x)))
    assert same(_extension.health(on_gpu), _reference.health(view(x)))


@pytest.mark.parametrize("row_bytes", [24, 32, 512, 1040, 8192, 20_000, 70_000])
@pytest.mark.parametrize("start", [0, 1])
def test_rows(cuda: torch.device, row_bytes: int, start: int) -> None:
    """Rows of any length, on and off 16-byte boundaries: each element counts once, and their ends are seen."""
    columns = row_bytes // 2
    x = any_bits(torch.bfloat16, (4_000_000 // row_bytes) * (columns + 24)).view(-1, columns + 24)
    view, on_gpu = x[:, start : start + columns], x.to(cuda)[:, start : start + columns]
    assert same(_extension.abs_range(on_gpu), _reference.abs_range(view))
    assert same(_extension.health(on_gpu), _reference.health(view))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_all_blocks_meet_every_time(cuda: torch.device, dtype: torch.dtype) -> None:
    """The last of many blocks writes the row and leaves the workspace zero, a thousand times in a row."""
    x = torch.full((3_000_001,), 2.0, device=cuda).to(dtype)
    bits = x.view(torch.uint8 if dtype.itemsize == 1 else dtype)
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, x.numel(), (1000,), generator=generator).tolist()
    one, two = torch.ones((), device=cuda).to(dtype), x[0].clone()
    rows = []
    for position in positions:
        bits[position] = one.view(bits.dtype)
        rows.append(_extension.abs_range(x))
        bits[position] = two.view(bits.dtype)
    assert torch.stack(rows).tolist() == [[1.0, 2.0, 1.0]] * len(positions)


def test_streams_do_not_meet(cuda: torch.device) -> None:
    """Calls that run at the same time on many streams, more than there are kept workspaces, give each its own row."""
    streams = [torch.cuda.Stream(cuda, priority=priority) for priority in (0, -1) for _ in range(40)]
    xs = [torch.full((500_000,), float(i + 1), device=cuda) for i in range(len(streams))]
    torch.cuda.synchronize(cuda)
    for _ in range(5):
        rows = []
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                rows.append(_extension.abs_range(x))
        torch.cuda.synchronize(cuda)
        assert [row.tolist() for row in rows] == [[i + 1.0, i + 1.0, 1.0] for i in range(len(streams))]


def test_three_numbers_at_once(cuda: torch.device) -> None:
    """The synchronous abs_range sees what was enqueued before it, for any strides, and is one kernel and no copy."""
    x = torch.zeros(1 << 22, device=cuda)
    assert nanwatch.abs_range(x) == (0.0, 0.0, True)
    for value in range(1, 200):
        x.fill_(value)
        assert nanwatch.abs_range(x) == (value, value, True)
        assert nanwatch.abs_range(x.view(2048, 2048)[:, 1::2]) == (value, value, True)
    x[-1] = float("-inf")
    assert nanwatch.abs_range(x) == (199.0, float("inf"), False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        nanwatch.abs_range(x)
    on_device = [
        event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert len(on_device) == 1, on_device
    assert "fast_kernel" in on_device[0]


def test_threads_wait_for_their_own_rows(cuda: torch.device) -> None:
    """Threads that ask at the same time get the numbers of their own tensors."""

    def ask(i: int) -> list[nanwatch.AbsRange]:
        with torch.cuda.stream(torch.cuda.Stream(cuda)):
            x = torch.full((100_000,), float(i), device=cuda)
            return [nanwatch.abs_range(x) for _ in range(200)]

    with ThreadPoolExecutor(8) as pool:
        for i, answers in enumerate(pool.map(ask, range(1, 9)), start=1):
            assert answers == [(i, i, True)] * 200


def test_waiting_inside_a_capture_is_refused_and_harms_nothing(cuda: torch.device) -> None:
    """The synchronous call says what to use in place of it, and the capture goes on."""
    x = torch.ones(1000, device=cuda)
    nanwatch.abs_range(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"torch\.ops\.nanwatch\.abs_range"):
            nanwatch.abs_range(x)
        row = _extension.abs_range(x)
    x.fill_(3)
    graph.replay()
    assert row.tolist() == [3, 3, 1]


def test_a_replay_beside_other_calls(cuda: torch.device) -> None:
    """A graph's launches have workspaces of their own: eager calls on other streams meanwhile change no row."""
    x, y = torch.full((5_000_000,), 4.0, device=cuda), torch.full((5_000_000,), 9.0, device=cuda)
    side = torch.cuda.Stream(cuda)
    _extension.abs_range(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = [_extension.abs_range(x) for _ in range(5)]
    torch.cuda.synchronize(cuda)
    for _ in range(50):
        graph.replay()
        with torch.cuda.stream(side):
            others = [_extension.abs_range(y) for _ in range(5)]
        torch.cuda.synchronize(cuda)
        assert [row.tolist() for row in rows] == [[4, 4, 1]] * 5
        assert [row.tolist() for row in others] == [[9, 9, 1]] * 5


def test_the_current_stream_is_used(cuda: torch.device) -> None:
    """A range asked for on a side stream sees what that stream wrote before, with no synchronisation between."""
    stream = torch.cuda.Stream(cuda)
    x = torch.zeros(1 << 24, device=cuda)
    torch.cuda.synchronize(cuda)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # long enough that a read on another stream would come first
        x.fill_(5)
        row = _extension.abs_range(x)
    stream.synchronize()
    assert row.tolist() == [5, 5, 1]


def test_a_cuda_graph_captures_and_replays(cuda: torch.device) -> None:
    """All three operators may be captured, and a replay reads the values of its own time."""
    x, y = torch.ones(100_000, device=cuda), torch.ones(64, 64, device=cuda)[:, ::2]
    _extension.abs_ranges([x, y])  # loads the kernels outside the capture
    _extension.health(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row, rows, health = _extension.abs_range(x), _extension.abs_ranges([x, y]), _extension.health(x)
    x[777] = float("inf")
    y.fill_(2)
    graph.replay()
    assert row.tolist() == [1, float("inf"), 0]
    assert rows.tolist() == [[1, float("inf"), 0], [2, 2, 1]]
    assert (health[6].item(), health[10].item()) == (1, 777)


def test_no_synchronisation(cuda: torch.device) -> None:
    """The operators enqueue work and do not wait for it."""
    x = torch.ones(1000, device=cuda)
    torch.cuda.synchronize(cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _extension.abs_range(x)
        _extension.abs_ranges([x, x[::2]])
        _extension.health(x)
        _spread.statistics(x, _extension.abs_range)
        _fingerprint.fingerprint(x)
        _spread.exponent_histogram(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_every_device(cuda: torch.device) -> None:
    """A tensor on another device than the current one is read there, and the current device stays."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    for index in range(torch.cuda.device_count()):
        row = _extension.abs_range(torch.full((10,), float(index), device=f"cuda:{index}"))
        assert row.device.index == index
        assert row.tolist() == [index, index, 1]
    assert torch.cuda.current_device() == cuda.index
    with pytest.raises(ValueError, match="device"):
        _extension.abs_ranges([torch.ones(1, device="cuda:0"), torch.ones(1, device="cuda:1")])


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(cuda: torch.device) -> None:
    """Sizes and positions are 64-bit, flat and strided."""
    count = (1 << 31) + 12_345
    if torch.cuda.mem_get_info(cuda)[0] < count + (1 << 30):
        pytest.skip("less than 3.2 GB of GPU memory is free")
    x = torch.ones(count, dtype=torch.float8_e5m2, device=cuda)
    x.view(torch.uint8)[-1] = 0x7C  # inf
    assert _extension.abs_range(x).tolist() == [1, float("inf"), 0]
    assert _extension.health(x)[10].item() == count - 1
    # 0x3c is 1.0: every second element, the last of them the inf.
    assert _extension.health(x[(count - 1) % 2 :: 2])[10].item() == (count - 1) // 2
    # Overlapping pairs: 2^32 elements, which only the plain kernel numbers.
    pairs = x.as_strided((count - 1, 2), (1, 1))
    assert _extension.abs_range(pairs).tolist() == [1, float("inf"), 0]
    assert _extension.health(pairs)[10].item() == 2 * (count - 1) - 1
