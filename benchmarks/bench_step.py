"""What watching costs a whole step: forwards, one-token decodes and training steps of real architectures.

    python benchmarks/bench_step.py [--quick] [--only gpt2] [--json FILE]

Four ways to run the same model, in turn, a round each: plain, with nanwatch.watch, with the transformers class, and
with an empty forward hook on every module (what PyTorch's own hook machinery costs). One model serves all four: two
copies of a model can lie in memory of two speeds. A ratio is taken within a round; the median over rounds counts.

nanwatch's own time is measured from inside (time in the recorder over time of the step), and its floor is what it had
to read over the bandwidth of a plain read of memory in this run. Weights are random and seeded, the configurations are
the real ones; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _timing import duration, machine, table, write_json
from bench_range import load_floor
from torch import nn

import nanwatch

Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model and the steps to time on it."""

    name: str
    build: Callable[[], nn.Module]
    steps: dict[str, Callable[[nn.Module], Step]]


# ---- models, from transformers' configurations ----


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes))


def mt5() -> nn.Module:
    from transformers import MT5Config, MT5ForConditionalGeneration

    sizes = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6}
    return MT5ForConditionalGeneration(MT5Config(vocab_size=32128, feed_forward_proj="gated-gelu", **sizes))


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000))


# ---- steps ----


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(5, 30000, (batch, length), generator=torch.Generator().manual_seed(length))


def without_gradients(call: Callable[[nn.Module], object]) -> Callable[[nn.Module], Step]:
    def make(model: nn.Module) -> Step:
        def step() -> object:
            with torch.no_grad():
                return call(model.eval())

        return step

    return make


def causal_forward(length: int) -> Callable[[nn.Module], Step]:
    ids = tokens(1, length)
    return without_gradients(lambda model: model(input_ids=ids, use_cache=False))


def decode(model: nn.Module) -> Step:
    """One token after 64, with a KV cache that is cut back each time."""
    model.eval()
    with torch.no_grad():
        cache = model(input_ids=tokens(1, 64), use_cache=True).past_key_values
    one = tokens(1, 1)

    def step() -> object:
        with torch.no_grad():
            model(input_ids=one, past_key_values=cache, use_cache=True)
        cache.crop(-1)
        return None

    return step


def training(loss: Callable[[nn.Module], torch.Tensor]) -> Callable[[nn.Module], Step]:
    def make(model: nn.Module) -> Step:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

        def step() -> object:
            model.train()
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
            return None

        return step

    return make


def causal_training(batch: int, length: int) -> Callable[[nn.Module], Step]:
    ids = tokens(batch, length)
    return training(lambda model: model(input_ids=ids, labels=ids, use_cache=False).loss)


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(batch))


def cases() -> list[Case]:
    source, target = tokens(1, 32), tokens(1, 32)
    sources, targets = tokens(4, 64), tokens(4, 64)
    labels = torch.arange(8)
    causal = {
        "decode 1 token": decode,
        "forward 64 tokens": causal_forward(64),
        "forward 512 tokens": causal_forward(512),
        "training 4x128 tokens": causal_training(4, 128),
    }
    return [
        Case("GPT-2 124M", gpt2, causal),
        Case("Llama 125M", llama, causal),
        Case(
            "mT5-small",
            mt5,
            {
                "forward 32 tokens": without_gradients(lambda m: m(input_ids=source, labels=target)),
                "forward 4x64 tokens": without_gradients(lambda m: m(input_ids=sources, labels=targets)),
                "training 4x64 tokens": training(lambda m: m(input_ids=sources, labels=targets).loss),
            },
        ),
        Case(
            "ResNet-50",
            resnet,
            {
                "forward 1 image": without_gradients(lambda m: m(pixel_values=images(1))),
                "training 8 images": training(lambda m: m(pixel_values=images(8), labels=labels).loss),
            },
        ),
    ]


# ---- the four ways ----


def swap_hooks(model: nn.Module, install: Callable[[], object]) -> Callable[[], Any]:
    """A context manager that puts back the hooks that `install` registers, without registering them again."""
    install()
    hooks = {module: dict(module._forward_hooks) for module in model.modules()}
    for module in hooks:
        module._forward_hooks.clear()

    @contextmanager
    def installed() -> Iterator[None]:
        for module, kept in hooks.items():
            module._forward_hooks.update(kept)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            for module in hooks:
                module._forward_hooks.clear()

    return installed


def swap_watch(model: nn.Module, watch: nanwatch.Watch) -> Callable[[], Any]:
    """The same for a Watch: what it remembers of the weights stays, as in a run of many steps."""
    place = "_compiled_call_impl"
    calls = {module: module.__dict__.pop(place) for module in model.modules()}

    @contextmanager
    def installed() -> Iterator[None]:
        for module, call in calls.items():
            module.__dict__[place] = call
        try:
            yield
        finally:
            for module in calls:
                del module.__dict__[place]

    return installed


def seconds(step: Step, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def measure(
    model: nn.Module, step: Step, budget: float, min_rounds: int, read_speed: float
) -> dict[str, Any]:
    from transformers.debug_utils import DebugUnderflowOverflow

    def register_empty() -> None:
        model.apply(lambda module: module.register_forward_hook(lambda *_: None))

    watch = nanwatch.watch(model, _measure_time=True)
    watched = swap_watch(model, watch)
    untimed = nanwatch.watch(model)
    ways = {
        "plain": contextlib.nullcontext,
        "nanwatch": swap_watch(model, untimed),
        "transformers": swap_hooks(model, lambda: DebugUnderflowOverflow(model)),
        "empty hooks": swap_hooks(model, register_empty),
        "nanwatch, timed": watched,
    }
    for way in ways.values():
        with way():
            step(), step()
    repeats = max(1, round(0.05 / seconds(step, 1))) if budget else 1
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    shuffle, order = random.Random(0).shuffle, list(ways)
    before = dict(watch.counters)
    steps = 0
    end = time.perf_counter() + budget
    while len(rounds["plain"]) < min_rounds or (time.perf_counter() < end and len(rounds["plain"]) < 200):
        shuffle(order)
        for name in order:
            # Far from 1, it needs few rounds, and one of them takes as long as ten of the others.
            if name == "transformers" and len(rounds[name]) >= min_rounds:
                continue
            with ways[name]():
                rounds[name].append(seconds(step, repeats))
        steps += repeats
    counters = {name: (value - before[name]) / steps for name, value in watch.counters.items()}
    watch.stop()
    untimed.stop()

    def ratio(name: str) -> float:
        return statistics.median(a / b for a, b in zip(rounds[name], rounds["plain"], strict=False))

    plain = statistics.median(rounds["plain"])
    own = counters["nanoseconds"] * 1e-9
    return {
        "plain_s": plain,
        "rounds": len(rounds["plain"]),
        "ratio_nanwatch": ratio("nanwatch"),
        "ratio_transformers": ratio("transformers"),
        "ratio_empty_hooks": ratio("empty hooks"),
        "own_share": own / plain,
        "own_s": own,
        "floor_s": counters["bytes_read"] / read_speed,
        "added_ratio": (ratio("transformers") - 1) * plain / max(own, 1e-9),
        **{name: counters[name] for name in ("calls", "tensors", "tensors_read", "bytes_read", "cache_hits")},
    }


def targets(step: str) -> tuple[float, float]:
    """(own share, ratio of step times) that this kind of step should stay below."""
    image = "image" in step
    if step.startswith("training"):
        return (0.015 if image else 0.010), 1.02
    if step.startswith("decode") or "32 tokens" in step:
        return float("nan"), 1.03
    return (0.02 if image else 0.015), 1.03


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument(
        "--quick", action="store_true", help="two rounds each: shows that it runs, measures nothing"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="measuring time of a row (default 20)")
    options = parser.parse_args()

    floor = load_floor().read_threads
    buffer = torch.randn(64 << 20)
    floor(buffer)
    read_speed = buffer.nbytes / statistics.median(seconds(lambda: floor(buffer), 1) for _ in range(9))
    rows = []
    for case in cases():
        if options.only.lower() not in case.name.lower():
            continue
        for name, make in case.steps.items():
            torch.manual_seed(0)
            model = case.build()
            budget, rounds = (0.0, 2) if options.quick else (options.seconds, 7)
            row = measure(model, make(model), budget, rounds, read_speed)
            own_target, ratio_target = targets(name)
            row["misses"] = [
                what
                for what, missed in (
                    ("own time", row["own_share"] > own_target),
                    ("ratio", row["ratio_nanwatch"] > ratio_target),
                    ("added", row["added_ratio"] < 20),
                )
                if missed
            ]
            rows.append({"model": case.name, "step": name, **row})
            print(f"{case.name}, {name}: {row['ratio_nanwatch']:.3f}, own {row['own_share']:.2%}", flush=True)
            if options.json:  # row by row: the whole takes minutes
                write_json(options.json, {"machine": machine(), "read_bytes_per_s": read_speed, "rows": rows})
    headings = (
        "step",
        "plain",
        "nanwatch",
        "transf.",
        "hooks",
        "own",
        "floor",
        "read",
        "MB",
        "hits",
        "misses",
    )
    print()
    print(
        table(
            headings,
            [
                (
                    f"{row['model']}, {row['step']}",
                    duration(row["plain_s"]),
                    f"{row['ratio_nanwatch']:.3f}",
                    f"{row['ratio_transformers']:.2f}",
                    f"{row['ratio_empty_hooks']:.3f}",
                    f"{row['own_share']:.2%}",
                    f"{row['floor_s'] / row['plain_s']:.2%}",
                    f"{row['tensors_read']:.0f}/{row['tensors']:.0f}",
                    f"{row['bytes_read'] / 1e6:.1f}",
                    f"{row['cache_hits']:.0f}",
                    ", ".join(row["misses"]) or "-",
                )
                for row in rows
            ],
        )
    )
    print(f"\nplain read of memory: {read_speed / 1e9:.1f} GB/s; times of a step are ratios to the plain one")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
