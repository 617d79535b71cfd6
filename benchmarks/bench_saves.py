"""Cost of `guard_checkpoints` to a healthy save: GPT-2's weights, changed by a step or unchanged since a forward.

    python benchmarks/bench_saves.py [--quick] [--rounds N] [--folder DIR]

Plain and guarded saves take turns. The median over the rounds counts, and the median of the ratios within a round, of
the time that passes and of that of the processor: the latter holds on a machine that does something else besides.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

import nanwatch

WIDTH, LAYERS, VOCABULARY = 768, 12, 50257


def weights(quick: bool) -> nn.Module:
    """The weights of GPT-2 (124 million), or a thousandth of them."""
    width, vocabulary = (24, 500) if quick else (WIDTH, VOCABULARY)
    layers = [nn.TransformerEncoderLayer(width, 12, 4 * width) for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(vocabulary, width), *layers)


def seconds(save: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that pass, and those of the processor, of all threads."""
    began, used = time.perf_counter(), time.process_time()
    save()
    return time.perf_counter() - began, time.process_time() - used


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
            for is_changed in (True, False):
                plain, guarded = [], []
                for _ in range(3 if options.quick else options.rounds):
                    plain.append(seconds(save))
                    with nanwatch.watch(model, guard_checkpoints=True, black_box=False), torch.no_grad():
                        if is_changed:
                            for x in model.parameters():
                                x.add_(0.0)
                        guarded.append(seconds(save))
                passed, used = (
                    statistics.median(b[i] / a[i] for a, b in zip(plain, guarded, strict=True))
                    for i in (0, 1)
                )
                typical = [1e3 * statistics.median(one for one, _ in times) for times in (plain, guarded)]
                content = "changed" if is_changed else "unchanged"
                print(
                    f"{name}, {content}: {typical[0]:.0f} ms, guarded {typical[1]:.0f} ms,"
                    f" ratio {passed:.3f}, of processor time {used:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
