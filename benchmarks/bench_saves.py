"""Cost of `guard_checkpoints` to a healthy save of GPT-2's weights.

    python benchmarks/bench_saves.py [--quick] [--rounds N] [--folder DIR]

Plain and guarded saves take turns, within a watch. The median over the rounds counts, and the median of the ratios
within a round, of the time that passes and of that of the processor: the latter holds on a machine that does something
else besides. "guard" is the time inside the guard, and "floor" that of one read of the weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

import nanwatch
from nanwatch.scan.guard import CheckpointGuard, Save

WIDTH, LAYERS, VOCABULARY = 768, 12, 50257


def weights(quick: bool) -> nn.Module:
    """The weights of GPT-2 (124 million), or a thousandth of them."""
    width, vocabulary = (24, 500) if quick else (WIDTH, VOCABULARY)
    layers = [nn.TransformerEncoderLayer(width, 12, 4 * width) for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(vocabulary, width), *layers)


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that pass, and those of the processor, of all threads."""
    began, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - used


def measured(model: nn.Module, save: Callable[[], object], rounds: int) -> str:
    """Return the times of plain and of guarded saves in words."""
    inside: list[float] = []

    def examine(guard: CheckpointGuard, save: Save) -> Any:
        began = time.perf_counter()
        result = original(guard, save)
        inside.append(time.perf_counter() - began)
        return result

    original, CheckpointGuard.examine = CheckpointGuard.examine, examine  # type: ignore[method-assign]
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    floor = []
    for _ in range(rounds):
        for is_guarded in (False, True):
            with nanwatch.watch(model, guard_checkpoints=is_guarded, black_box=False):
                times[is_guarded].append(seconds(save))
        floor.append(seconds(lambda: nanwatch.abs_ranges(list(model.parameters())))[0])
    CheckpointGuard.examine = original  # type: ignore[method-assign]
    passed, used = (
        statistics.median(b[i] / a[i] for a, b in zip(times[False], times[True], strict=True)) for i in (0, 1)
    )
    plain, guarded = (1e3 * statistics.median(each[0] for each in times[way]) for way in (False, True))
    own, least = (1e3 * statistics.median(each) for each in (inside, floor))
    return (
        f"{plain:.0f} ms, guarded {guarded:.0f} ms, ratio {passed:.3f}, of processor time {used:.3f};"
        f" guard {own:.1f} ms = {own / plain:.1%}, floor {least:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, three rounds")
    parser.add_argument(
        "--folder", type=Path, help="where to save; by default the folder for temporary files"
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each way, 15 by default")
    options = parser.parse_args()
    model = weights(options.quick)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        ways: dict[str, Callable[[], object]] = {
            "torch.save": lambda: torch.save(model.state_dict(), f"{folder}/a.pt"),
            "safetensors": lambda: safetensors.torch.save_file(model.state_dict(), f"{folder}/a.safetensors"),
        }
        for name, save in ways.items():
            save()
            rounds = 3 if options.quick else options.rounds
            print(f"{name}: {measured(model, save, rounds)}", flush=True)


if __name__ == "__main__":
    main()
