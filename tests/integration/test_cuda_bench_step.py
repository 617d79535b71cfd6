"""The step benchmark on a GPU, as far as it can be tested without one: its row over a tiny model, and its verdicts."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from support.paths import BENCHMARKS
from support.recorders import needs_native


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _step_cuda

    return _step_cuda


def training(bench: ModuleType, **changed: Any) -> Any:
    """A row of training just within every bound, but for what is changed."""
    row = {
        "step": "training",
        "plain_s": 0.1,
        "ratio_batch": 1.5,
        "ratio_async": 1.02,
        "added_s": 0.0013,
        "floor_s": 0.001,
        "host_s": 6e-6,
        "waits": 0,
        "waits_of_step": 1,
    }
    return bench.StepRow(**{**row, **changed})


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, ()),
        ({"ratio_async": 1.021}, ("training, watched over unwatched",)),
        ({"floor_s": 0.00099}, ("training, added time over its floor",)),
        ({"host_s": 6.1e-6}, ("host time of a module call, us",)),
        ({"waits": 1}, ("waits of the host in forward and backward with check='async'",)),
        ({"waits_of_step": 2}, ("the same, in the optimizer's step",)),
    ],
)
def test_each_target_is_held_to_its_bound(
    bench: ModuleType, changed: dict[str, Any], missed: tuple[str, ...]
) -> None:
    """A row just within the bounds passes, one just beyond any of them is named."""
    targets = bench.judge([training(bench, **changed)])
    assert len(targets) == 5
    assert tuple(target.name for target in targets if not target.passed) == missed


def test_a_replayed_graph_has_a_bound_of_its_own(bench: ModuleType) -> None:
    """1.05, and nothing of what a training step is asked."""
    rows = [bench.StepRow("decode", 1e-3, None, ratio, 0.0) for ratio in (1.05, 1.06)]
    assert [target.passed for target in bench.judge(rows)] == [True, False]


def test_only_calls_that_wait_are_counted(bench: ModuleType) -> None:
    """Launches and asynchronous copies are none; what a hook before an optimizer's step does is the step's."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])

    def calls(*names: str) -> None:
        for name in names:
            with torch.profiler.record_function(name):
                weight.detach().add(1)

    optimizer.register_step_pre_hook(lambda *_: calls("cudaEventSynchronize", "cudaLaunchKernel"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        calls("cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize", "cudaDeviceSynchronize")
        optimizer.step()
    assert bench.waited(profile.events()) == (2, 1)


@needs_native
def test_the_training_row_of_a_tiny_model(bench: ModuleType) -> None:
    """All that the row says of a step is measured, and the device is waited for once a step."""
    import bench_step
    from _steps import llama_of

    model = llama_of(16, 32, layers=2, heads=2, vocabulary=64)
    ids = torch.arange(8).reshape(2, 4)
    steps, waits = [], []

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()
        steps.append(1)

    row = bench.training_row(bench_step.measure, model, step, lambda: waits.append(1), 1e9, 0.0)
    assert row.ratio_async > 0
    assert row.ratio_batch > 0
    assert row.ratio_transformers > 0
    assert row.added_s == (row.ratio_async - 1) * row.plain_s
    assert row.floor_s > 0
    assert 0 < row.host_s < row.plain_s
    assert row.waits == row.waits_of_step == 0
    assert len(steps) == len(waits) + 1  # the plain step under the profiler needs none
    assert {target.name for target in bench.judge([row])} >= {"host time of a module call, us"}


def test_a_decoded_token_is_that_of_a_whole_forward(bench: ModuleType) -> None:
    """The step that is captured gives what 65 tokens without a cache give, each time."""
    from _steps import llama_of

    torch.manual_seed(0)
    model = llama_of(16, 32, layers=2, heads=2, vocabulary=64).eval()
    step = bench.decode(model, torch.device("cpu"))
    ids = torch.full((1, 65), 7)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[:, -1]
    for _ in range(2):
        torch.testing.assert_close(step().logits[:, -1], expected, rtol=1e-4, atol=1e-5)
