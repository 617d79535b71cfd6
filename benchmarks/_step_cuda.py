"""The step benchmark on a GPU: a Llama-style 1B in bfloat16, its training step and one token through a CUDA graph.

A step is timed until the device has done it. What a watch adds to it is held against its floor: the bytes that it had
to read over the bandwidth of a plain read of device memory in this run. How often the host waited is counted by the
profiler, watched and not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from _range_cuda import Floor
from _steps import Step, causal_training, llama_of
from _targets import Target
from _timing import Candidate, Plan, duration, interleave, machine, table
from torch import nn

import nanwatch

# Functions with which a host waits for a device; cudaMemcpy without Async waits, too.
WAITS = frozenset({"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"})
REPLAYS = Plan(min_rounds=9, max_rounds=101, budget=5.0, sample=2e-3)
QUICK_REPLAYS = Plan(min_rounds=3, max_rounds=3, budget=0.0, sample=1e-4)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step; ratios of step times to the plain one, medians over rounds.

    `added_s`: what the watch with check="async" adds to a step, in seconds. `floor_s`: bytes read over the bandwidth of
    a plain read. `host_s`: the recorder's own time on the host for a module call. `waits`: how often the host waited in
    the forward and backward of a step with that watch, less in a plain one; `waits_of_step`: in the optimizer's. None
    where a row has no such thing.
    """

    step: str
    plain_s: float
    ratio_batch: float | None
    ratio_async: float
    added_s: float
    floor_s: float | None = None
    host_s: float | None = None
    waits: int | None = None
    waits_of_step: int | None = None
    ratio_transformers: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def llama_1b() -> nn.Module:
    """Sizes of Llama 3.2 1B, random weights in bfloat16."""
    return llama_of(2048, 8192, layers=16, heads=32, vocabulary=128256, num_key_value_heads=8).bfloat16()


def is_of_optimizer(event: Any) -> bool:
    """Return whether this event of a profile lies in an optimizer's step, its hooks included."""
    while event is not None:
        if event.name.startswith("Optimizer.step#"):
            return True
        event = event.cpu_parent
    return False


def waited(events: Iterable[Any]) -> tuple[int, int]:
    """How many of these events of a profile are waits of the host: outside of an optimizer's step, and in it."""
    waits = [is_of_optimizer(event) for event in events if event.name in WAITS]
    return waits.count(False), waits.count(True)


def waits_of(step: Step) -> tuple[int, int]:
    """How often the host waits in a step, outside of the optimizer's and in it."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
        step()
    return waited(profile.events())


def read_speed(device: torch.device) -> float:
    """Bytes a second of a plain read of memory that is in no cache."""
    floor, x = Floor(device), torch.zeros(1 << 28, dtype=torch.float32, device=device)

    def once(_: object) -> None:
        floor.read(x)
        torch.cuda.synchronize()

    samples = interleave({"read": Candidate(once, None)}, Plan(15, 15, 1.0, 1e-3))
    return x.nbytes / samples.seconds("read")


def training_row(
    measure: Callable[..., dict[str, Any]],
    model: nn.Module,
    step: Step,
    synchronize: Callable[[], object],
    speed: float,
    budget: float,
) -> StepRow:
    """A training step in all ways of bench_step.measure that a GPU is asked about."""

    def whole() -> object:
        step()
        return synchronize()

    found = measure(
        model, whole, {"nanwatch", "async", "transformers"}, budget, 2 if budget == 0 else 7, speed
    )
    plain = waits_of(step)
    with nanwatch.watch(model, check="async"):
        step(), synchronize()
        watched = waits_of(step)
        synchronize()
    return StepRow(
        step="training",
        plain_s=found["plain_s"],
        ratio_batch=found["ratio_nanwatch"],
        ratio_async=found["ratio_async"],
        added_s=(found["ratio_async"] - 1) * found["plain_s"],
        floor_s=found["floor_s"],
        host_s=found["own_s"] / found["calls"],
        waits=watched[0] - plain[0],
        waits_of_step=watched[1] - plain[1],
        ratio_transformers=found["ratio_transformers"],
    )


def decode(model: nn.Module, device: torch.device) -> Step:
    """One token after 64, in a cache that keeps its place."""
    from transformers import StaticCache

    model.eval()
    ids = torch.full((1, 64), 7, device=device)
    one, position = ids[:, :1].clone(), torch.tensor([64], device=device)
    cache = StaticCache(config=model.config, max_cache_len=128)  # type: ignore[arg-type]
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)

    def step() -> object:
        with torch.no_grad():
            return model(input_ids=one, past_key_values=cache, cache_position=position, use_cache=True)

    return step


def captured(step: Step) -> torch.cuda.CUDAGraph:
    """The step as a graph, warmed up first as PyTorch's notes say."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def replay_row(model: nn.Module, device: torch.device, plan: Plan) -> StepRow:
    """Replays of a graph that was captured unwatched, and of one captured watched, with a look after each."""
    step = decode(model, device)
    plain = captured(step)
    with nanwatch.watch(model, check="async") as watch:
        watched = captured(step)

        def replay(_: object) -> None:
            plain.replay()
            torch.cuda.synchronize()

        def replay_and_look(_: object) -> None:
            watched.replay()
            torch.cuda.synchronize()
            watch.look()

        samples = interleave(
            {"plain": Candidate(replay, None), "async": Candidate(replay_and_look, None)}, plan
        )
    ratio = samples.ratio("async", "plain")
    seconds = samples.seconds("plain")
    return StepRow("decode 1 token, CUDA graph", seconds, None, ratio, (ratio - 1) * seconds)


def judge(rows: Iterable[StepRow]) -> list[Target]:
    """Every target that the rows say something about. Meant for an H200."""
    found: list[Target] = []

    def at_most(name: str, bound: float, value: float | None, row: StepRow) -> None:
        if value is not None:
            found.append(Target(name, f"<= {bound:g}", f"{value:#.3g}", value <= bound, row.step))

    for row in rows:
        if row.step == "training":
            at_most("training, watched over unwatched", 1.02, row.ratio_async, row)
            if row.floor_s:
                at_most("training, added time over its floor", 1.3, row.added_s / row.floor_s, row)
            at_most(
                "host time of a module call, us", 6, None if row.host_s is None else row.host_s * 1e6, row
            )
            at_most("waits of the host in forward and backward with check='async'", 0, row.waits, row)
            at_most("the same, in the optimizer's step", 1, row.waits_of_step, row)
        else:
            at_most("one token through a CUDA graph, watched over unwatched", 1.05, row.ratio_async, row)
    return found


def rows(measure: Callable[..., dict[str, Any]], budget: float) -> Iterator[StepRow]:
    """The rows, each as soon as it is measured."""
    device = torch.device("cuda", torch.cuda.current_device())
    speed = read_speed(device)
    print(f"plain read of device memory: {speed / 1e12:.2f} TB/s", file=sys.stderr, flush=True)
    torch.manual_seed(0)
    model = llama_1b().to(device)
    yield replay_row(model, device, QUICK_REPLAYS if budget == 0 else REPLAYS)
    step = causal_training(4, 1024, device)(model)
    yield training_row(measure, model, step, torch.cuda.synchronize, speed, budget)


def run(measure: Callable[..., dict[str, Any]], budget: float) -> dict[str, Any]:
    """Measure, print the table and the verdicts; all of it for JSON."""
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no CUDA device here")
    done = []
    for row in rows(measure, budget):
        done.append(row)
        print(
            f"{row.step}: {duration(row.plain_s)}, async {row.ratio_async:.3f}", file=sys.stderr, flush=True
        )
    body = [
        [f"{value:#.4g}" if isinstance(value, float) else str(value) for value in asdict(row).values()]
        for row in done
    ]
    print(table(list(asdict(done[0])), body))
    targets = judge(done)
    verdicts = [[t.name, t.wanted, t.found, "pass" if t.passed else "MISS"] for t in targets]
    print("\ntargets, for an H200")
    print(table(["what", "wanted", "found", ""], verdicts))
    about = machine(gpu=torch.cuda.get_device_name(), cuda=str(torch.version.cuda))
    return {
        "machine": about,
        "rows": [row.to_json() for row in done],
        "targets": [target.to_json() for target in targets],
    }
