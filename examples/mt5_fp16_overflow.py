"""Train mT5 in fp16 mixed precision until it overflows, and show the frames that led to it.

    python examples/mt5_fp16_overflow.py
    python examples/mt5_fp16_overflow.py --quick

The model is MT5ForConditionalGeneration with the configuration of google/mt5-small and random weights. Only the
vocabulary is cut, from 250,112 words to 4,096: the embedding would take 85 % of the weights and of the optimizer's
time, and has no part in the overflow. The task is to copy random words. AdamW with a gradient scaler trains it under
fp16 autocast. The learning rate warms up to 0.1, a hundred times what mT5 likes, so the weights of the feed-forward
layers grow, and the product of three of them grows with the cube. Then `DenseReluDense.wo`, or the dropout behind it
that scales what it keeps by 1/0.9, passes 65504, the largest fp16 number. No nan and no inf is planted, and nothing is
scaled by hand.

Afterwards a copy of the same training that does not overflow is timed: unwatched, watched by nanwatch, and watched by
the DebugUnderflowOverflow of transformers, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import nanwatch

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers import MT5Config, MT5ForConditionalGeneration
    from transformers.debug_utils import DebugUnderflowOverflow
except ImportError as error:
    raise SystemExit(
        f"the demo needs transformers and rich ({error}); try: pip install transformers rich"
    ) from error

VOCABULARY = 4096
# Sentences, words read, words written. The small batch is for CPUs that emulate fp16 products, where the large one
# takes 20 s per step instead of 0.5 s. Both overflow.
FAST_BATCH, SLOW_BATCH = (4, 48, 32), (1, 12, 8)
LEARNING_RATE = 0.1


class Training:
    """mT5-small, its optimizer and its data; the same seed gives the same training."""

    def __init__(self, seed: int, batch: tuple[int, int, int], *, learning_rate: float, warmup: int) -> None:
        torch.manual_seed(seed)
        config = MT5Config(
            vocab_size=VOCABULARY,
            d_model=512,
            d_kv=64,
            d_ff=1024,
            num_layers=8,
            num_decoder_layers=8,
            num_heads=6,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.1,
        )
        self.model = MT5ForConditionalGeneration(config).train()
        self._batch = batch
        self._words = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / warmup)
        )
        self._scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(self) -> float:
        """Train on one batch and return the loss."""
        sentences, source, target = self._batch
        words = torch.randint(2, VOCABULARY, (sentences, source), generator=self._words)
        with torch.autocast("cpu", torch.float16):
            loss = self.model(input_ids=words, labels=words[:, :target].contiguous()).loss
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._schedule.step()
        self._optimizer.zero_grad()
        return float(loss.detach())


def affordable_batch() -> tuple[int, int, int]:
    """Return the large batch if this CPU does 8 billion fp16 operations per second in a matrix product."""
    a, b = torch.ones(128, 512, dtype=torch.float16), torch.ones(512, 1024, dtype=torch.float16)
    seconds = []
    for _ in range(5):  # the fastest counts: another program can make one product 20 times slower
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return FAST_BATCH if 2 * 128 * 512 * 1024 / min(seconds) > 8e9 else SLOW_BATCH


def train_until_overflow(
    seed: int, batch: tuple[int, int, int], warmup: int, steps: int, progress: Progress
) -> nanwatch.NonFiniteError:
    """Train under watch until a value is not finite, and return what nanwatch raised."""
    training = Training(seed, batch, learning_rate=LEARNING_RATE, warmup=warmup)
    task = progress.add_task("training, watched", total=steps)
    with nanwatch.watch(training.model):
        for _ in range(steps):
            try:
                loss = training.step()
            except nanwatch.NonFiniteError as error:
                progress.update(task, description="overflow caught")
                return error
            progress.update(task, advance=1, description=f"training, watched, loss {loss:6.1f}")
    raise SystemExit(f"nothing overflowed in {steps} steps; try more --steps or another --seed")


class _Removable(DebugUnderflowOverflow):
    """The class of transformers, with its hooks kept so that they can be taken off again."""

    def _register_forward_hook(self, module: nn.Module) -> None:
        self.__dict__.setdefault("handles", []).append(module.register_forward_hook(self.forward_hook))


@contextlib.contextmanager
def watched_by_transformers(model: nn.Module) -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        debug = _Removable(model)
        try:
            yield
        finally:
            for handle in debug.handles:
                handle.remove()


WATCHERS = {
    "unwatched": lambda model: contextlib.nullcontext(),
    "nanwatch": nanwatch.watch,
    "transformers": watched_by_transformers,
}


def measure_cost(
    seed: int, batch: tuple[int, int, int], rounds: int, progress: Progress
) -> dict[str, dict[str, float]]:
    """Return the median seconds of a step, and the median ratio to an unwatched step of the same round.

    The learning rate is 0: the optimizer does all its work and the model stays as it is, so every step is alike.
    """
    training = Training(seed, batch, learning_rate=0.0, warmup=1)
    seconds: dict[str, list[float]] = {name: [] for name in WATCHERS}
    task = progress.add_task("what watching costs", total=rounds * len(WATCHERS))
    training.step()
    for turn in range(rounds):
        names = list(WATCHERS)
        # Each watcher is first in one round and last in another.
        for name in names[turn % 3 :] + names[: turn % 3]:
            with WATCHERS[name](training.model):
                training.step()  # not timed: a training pays for the set-up of the first step once
                for _ in range(5):
                    start = time.perf_counter()
                    training.step()
                    seconds[name].append(time.perf_counter() - start)
            progress.advance(task)
    return {
        name: {
            "seconds": statistics.median(times),
            "ratio": statistics.median(a / b for a, b in zip(times, seconds["unwatched"], strict=True)),
        }
        for name, times in seconds.items()
    }


def print_cost(batch: tuple[int, int, int], cost: dict[str, dict[str, float]]) -> None:
    threads = torch.get_num_threads()
    print(
        f"\nWhat watching costs, a training step of {batch[0]} x {batch[1]} words,"
        f" {threads} thread{'s' * (threads > 1)}:"
    )
    for name, values in cost.items():
        print(f"  {name:13} {values['seconds']:6.3f} s   {values['ratio']:5.2f} times")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a shorter warm-up and fewer rounds of timing")
    parser.add_argument("--steps", type=positive, default=60, help="give up after so many steps (60)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and dropout (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    options = parser.parse_args(arguments)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    batch = affordable_batch()
    with Progress(*columns, console=console) as progress:
        error = train_until_overflow(
            options.seed, batch, 10 if options.quick else 20, options.steps, progress
        )
    if not options.json:
        print(error.report.to_text(color=sys.stdout.isatty()), flush=True)
    with Progress(*columns, console=console) as progress:
        cost = measure_cost(options.seed, batch, 1 if options.quick else 3, progress)
    if options.json:
        document: dict[str, Any] = {"report": json.loads(error.report.to_json()), "cost": cost}
        print(json.dumps(document, allow_nan=False))
    else:
        print_cost(batch, cost)


if __name__ == "__main__":
    main()
