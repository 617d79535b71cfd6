"""Cost of a default watch in small and odd programs, by processor time, each against itself unwatched.

Every case is a step of a program that is not a large dense model. Two copies of it run in alternating rounds of one
process: one watched, one not. A third, unwatched copy is the null test: its ratio says how far the numbers can be
trusted. Processor time counts the work of the watch and none of other programs, and with one thread nothing waits.

    python benchmarks/bench_odd.py [--cases mlp,mask] [--rounds 41] [--json odd.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nanwatch

Step = Callable[[], object]
Case = Callable[[], tuple[nn.Module, Step]]
CASES: dict[str, tuple[Case, float]] = {}


def case(name: str, bound: float) -> Callable[[Case], Case]:
    """Register a case under its name, with the ratio that it may have."""

    def register(make: Case) -> Case:
        CASES[name] = make, bound
        return make

    return register


def training(model: nn.Module, loss: Callable[[], Tensor], **options: Any) -> Step:
    """Return a step of SGD: forward, backward, update."""
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=1e-4, **options)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


@case("MLP, training", 1.12)
def mlp() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
    return model, training(model, lambda: nn.functional.cross_entropy(model(x), y))


@case("300 tiny modules, training", 1.12)
def tiny_modules() -> tuple[nn.Module, Step]:
    model = nn.Sequential(*[part for _ in range(150) for part in (nn.Linear(16, 16), nn.ReLU())])
    x = torch.randn(16, 16)
    return model, training(model, lambda: model(x).square().mean())


@case("small conv net, training", 1.12)
def conv_net() -> tuple[nn.Module, Step]:
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 11 * 11, 10)),
    )
    x = torch.randn(4, 1, 28, 28)
    return model, training(model, lambda: model(x).square().mean())


class Lstm(nn.Module):
    """An LSTM over a short sequence, with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@case("LSTM, training", 1.12)
def lstm() -> tuple[nn.Module, Step]:
    model, x = Lstm(), torch.randn(8, 20, 32)
    return model, training(model, lambda: model(x).square().mean())


class Attention(nn.Module):
    """Self-attention with a float mask of -inf as a buffer, and a feed-forward part."""

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.rest = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )
        self.register_buffer("mask", torch.full((length, length), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (t.view(batch, length, 8, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        scores = (q @ k.mT * (dim // 8) ** -0.5 + self.mask[:length, :length]).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, dim))
        return x + self.rest(x)


def masked_gpt() -> nn.Module:
    """A GPT with a mask of 16 MB in each block."""
    return nn.Sequential(
        nn.Embedding(1000, 256), *[Attention(256, 2048) for _ in range(6)], nn.Linear(256, 1000)
    )


@case("GPT with a mask buffer, training", 1.05)
def masked_training() -> tuple[nn.Module, Step]:
    model, ids = masked_gpt(), torch.randint(0, 1000, (2, 128))
    return model, training(model, lambda: model(ids).square().mean())


@case("GPT with a mask buffer, one token", 1.10)
def masked_token() -> tuple[nn.Module, Step]:
    model, ids = masked_gpt().eval(), torch.randint(0, 1000, (1, 1))
    return model, torch.no_grad()(lambda: model(ids))


def llama(**options: Any) -> Any:
    """A Llama of 8 layers of 256."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=8, num_attention_heads=8,
        **options,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@case("Llama, one token with a cache", 1.06)
def llama_token() -> tuple[nn.Module, Step]:
    from transformers import DynamicCache

    model: Any = llama().eval()
    ids = torch.randint(0, 1000, (1, 64))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)

    def step() -> None:
        with torch.no_grad():
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return model, step


@case("Llama, eager attention, training", 1.05)
def eager_attention() -> tuple[nn.Module, Step]:
    model = llama(attn_implementation="eager")
    ids = torch.randint(0, 1000, (2, 128))
    return model, training(model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss)


class Tables(nn.Module):
    """A head over a table: a buffer, a frozen parameter, or sparse embeddings."""

    def __init__(self, table: nn.Module | Tensor) -> None:
        super().__init__()
        if isinstance(table, nn.Module):
            self.table = table
        else:
            self.register_buffer("table", table)
        self.head = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8)
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids) if isinstance(self.table, nn.Module) else self.table[ids])


def table_training(table: Any, batch: int = 128) -> tuple[nn.Module, Step]:
    """Train the head, and the table if it is no buffer and not frozen."""
    model, ids = Tables(table), torch.randint(0, 1000, (batch,))
    return model, training(model, lambda: model(ids).square().mean())


@case("float buffer of 300 MB, training", 1.05)
def large_buffer() -> tuple[nn.Module, Step]:
    return table_training(torch.randn(1_200_000, 64))


@case("frozen table of 384 MB, training the head", 1.05)
def frozen_table() -> tuple[nn.Module, Step]:
    return table_training(nn.Embedding.from_pretrained(torch.randn(1_500_000, 64)))


@case("sparse embedding of 128 MB, training", 1.05)
def sparse_embedding() -> tuple[nn.Module, Step]:
    return table_training(nn.Embedding(500_000, 64, sparse=True))


class Bags(nn.Module):
    """26 EmbeddingBags, as a recommender has, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20_000, 32, sparse=True) for _ in range(26))
        self.head = nn.Sequential(nn.Linear(26 * 32, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([bag(ids) for bag in self.bags], dim=1))


@case("26 EmbeddingBags, training", 1.05)
def embedding_bags() -> tuple[nn.Module, Step]:
    model, ids = Bags(), torch.randint(0, 20_000, (256, 4))
    return model, training(model, lambda: model(ids).square().mean())


class Lists(nn.Module):
    """A forward that mentions nested lists of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        self.table = [[0.0] * 250 for _ in range(250)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * len(self.table)


@case("lists of numbers in a forward", 1.02)
def lists() -> tuple[nn.Module, Step]:
    model, x = Lists().eval(), torch.randn(1024, 256)
    return model, torch.no_grad()(lambda: model(x))


def measure(make: Case, rounds: int) -> dict[str, float]:
    """Return the processor time of the plain step, and the ratios of the watched one and of the null test."""
    steps: dict[str, Step] = {}
    models = []
    for name in ("plain", "null", "watched"):
        torch.manual_seed(0)
        model, steps[name] = make()
        models.append(model)
    watch = nanwatch.watch(models[-1])
    for step in steps.values():
        for _ in range(3):
            step()
    begin = time.process_time()
    steps["plain"]()
    repeats = max(1, round(0.02 / max(1e-6, time.process_time() - begin)))
    gc.collect()
    found: dict[str, list[float]] = {name: [] for name in steps}
    names = [*steps]
    for position in range(rounds):
        for name in names[position % 3 :] + names[: position % 3]:
            begin = time.process_time()
            for _ in range(repeats):
                steps[name]()
            found[name].append((time.process_time() - begin) / repeats)
    watch.stop()
    ratios = {
        name: statistics.median(a / b for a, b in zip(found[name], found["plain"], strict=True))
        for name in ("watched", "null")
    }
    return {"plain_ms": statistics.median(found["plain"]) * 1e3, **ratios}


def main() -> None:
    """Measure and print each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="", help="only cases with one of these words, separated by commas")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    words = [word for word in options.cases.split(",") if word]
    rows = []
    print(f"{'case':44} {'plain ms':>9} {'watched':>8} {'null':>6} {'bound':>6}")
    for name, (make, bound) in CASES.items():
        if words and not any(word.lower() in name.lower() for word in words):
            continue
        row = measure(make, options.rounds)
        rows.append({"case": name, "bound": bound, **row})
        over = "  over" if row["watched"] > bound else ""
        print(
            f"{name:44} {row['plain_ms']:9.3f} {row['watched']:8.3f} {row['null']:6.3f} {bound:6.2f}{over}",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
