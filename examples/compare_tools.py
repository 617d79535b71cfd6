"""Compare tools that look for nan and inf on one training that overflows: their reports and their cost.

    python examples/compare_tools.py
    python examples/compare_tools.py --markdown cost.md --json cost.json
    python examples/compare_tools.py --quick --json -

The model is a stack of gated residual blocks in bfloat16 autocast. Its learning rate is far too high, so the forward
overflows after a few steps; nothing is planted. Every tool sees the same training from the same seed. Then a step that
does not overflow (its learning rate is 0) is timed under each tool. The tools take turns in one process, and the table
has the ratio to the bare step of the same round. DebugMode and the dispatch mode check every operation. Anomaly mode
checks gradients only, so it raises when the backward meets what the forward made. A file of `-` is stdout, which then
has that document and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nanwatch

try:
    import lightning
    from transformers.debug_utils import DebugUnderflowOverflow
except ImportError as error:
    raise SystemExit(
        f"transformers and lightning are needed ({error}); try: pip install transformers lightning"
    ) from error

MAX_STEPS = 50
LEARNING_RATES = {16: 30.0, 512: 100.0}  # by width: with much less nothing overflows
ROWS = 128


class Block(nn.Module):
    """A gated feed-forward layer with its residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.gate(x)) * self.up(x))


class Training:
    """The model, its optimizer and its data; the same seed gives the same training."""

    def __init__(self, width: int, depth: int, learning_rate: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.data = torch.randn(ROWS, width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)

    def loss(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = self.model(self.data)
        return (output.float() - self.data.flip(1)).abs().mean()

    def step(self) -> None:
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class FiniteMode(TorchDispatchMode):
    """Dispatch mode that checks every result of every operation, as people write it themselves."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if torch.is_tensor(x) and x.is_floating_point() and not x.isfinite().all():
                raise FloatingPointError(f"{func} gave a value that is not finite")
        return result


class Removable(DebugUnderflowOverflow):
    """The class of transformers, with its hooks kept so that they can be taken off again."""

    def _register_forward_hook(self, module: nn.Module) -> None:
        self.__dict__.setdefault("handles", []).append(module.register_forward_hook(self.forward_hook))


@contextlib.contextmanager
def transformers_class(model: nn.Module) -> Iterator[None]:
    debug = Removable(model)
    try:
        yield
    finally:
        for handle in debug.handles:
            handle.remove()


@contextlib.contextmanager
def debug_mode(model: nn.Module) -> Iterator[None]:
    """Log of every operation with the L1 norm of its result, by torch. It raises nothing, so its log is searched."""
    from torch.utils._debug_mode import DebugMode

    with DebugMode(record_nn_module=True) as mode, DebugMode.log_tensor_hashes():
        yield
    lines = mode.debug_string(show_stack_trace=False).splitlines()
    bad = next((line for line in lines if re.search(r"hash': [^}]*(nan|inf)", line)), None)
    if bad is not None:
        raise FloatingPointError(
            f"in a log of {len(lines)} lines the first with nan or inf is: {bad.strip()[:300]}"
        )


def bare(model: nn.Module) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


Tool = Callable[[nn.Module], AbstractContextManager[Any]]
TOOLS: dict[str, Tool] = {
    "nanwatch": lambda model: nanwatch.watch(model),
    "nanwatch, gradients too": lambda model: nanwatch.watch(model, gradients=True),
    "transformers DebugUnderflowOverflow": transformers_class,
    "torch.autograd.detect_anomaly": lambda model: torch.autograd.detect_anomaly(),
    "torch.utils._debug_mode.DebugMode": debug_mode,
    "a TorchDispatchMode of ten lines": lambda model: FiniteMode(),
}


class LitTraining(lightning.LightningModule):
    """The same training for Lightning."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training_ = training
        self.model = training.model
        self.started: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.started.append(time.perf_counter())
        return self.training_.loss()

    def configure_optimizers(self) -> Any:
        return self.training_.optimizer


def fit(module: LitTraining, steps: int, *, detect_anomaly: bool) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, detect_anomaly=detect_anomaly,
    )  # fmt: skip
    trainer.fit(module, [torch.zeros(1)] * steps)


def said_by(run: Callable[[], None]) -> dict[str, Any]:
    """Return what is printed, warned and raised while `run()` trains."""
    out, error = io.StringIO(), io.StringIO()
    raised = ""
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
        warnings.catch_warnings(record=True) as heard,
    ):
        warnings.simplefilter("always")
        try:
            run()
        except Exception as failure:
            raised = f"{type(failure).__name__}: {failure}"
    told = [
        str(one.message)
        for one in heard
        if "anomaly" in str(one.message).lower() or "Error detected" in str(one.message)
    ]
    return {"stdout": out.getvalue().strip(), "warnings": told, "raised": raised}


def failing_run(tool: Tool, size: tuple[int, int]) -> tuple[dict[str, Any], int]:
    """Return the report of the tool on the training that overflows, and the step at which it stopped."""
    training = Training(*size, LEARNING_RATES[size[0]])
    # One context for all steps, or one per step if the log of a whole training would not fit in memory.
    for_all, for_each = (bare, tool) if tool is debug_mode else (tool, bare)
    steps = 0

    def run() -> None:
        nonlocal steps
        with for_all(training.model):
            for steps in range(MAX_STEPS):  # noqa: B007
                with for_each(training.model):
                    training.step()

    return said_by(run), steps


def first_bad_step(size: tuple[int, int]) -> int:
    """Return the first step whose loss is non-finite."""
    training = Training(*size, LEARNING_RATES[size[0]])
    for step in range(MAX_STEPS):
        if not training.loss().isfinite():
            return step
        training.step()
    raise SystemExit(f"nothing overflowed in {MAX_STEPS} steps; try another size")


def cost(size: tuple[int, int], rounds: int) -> dict[str, float]:
    """Return the median over rounds of the ratio of a step's time to the bare step of the same round."""
    training = Training(*size, 0.0)
    tools = {"bare": bare, **TOOLS}
    ratios: dict[str, list[float]] = {name: [] for name in TOOLS}
    training.step()
    for turn in range(rounds):
        names = list(tools)
        shift = turn % len(names)
        seconds = {}
        for name in names[shift:] + names[:shift]:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with tools[name](training.model):
                    training.step()  # not timed: a training pays for the set-up of the first step once
                    start = time.perf_counter()
                    training.step()
                    seconds[name] = time.perf_counter() - start
        for name, values in ratios.items():
            values.append(seconds[name] / seconds["bare"])
    return {name: statistics.median(values) for name, values in ratios.items()} | {
        "lightning detect_anomaly": lightning_cost(size, rounds)
    }


def lightning_cost(size: tuple[int, int], rounds: int) -> float:
    """Return the same ratio for a step of Lightning's Trainer with detect_anomaly, over one without."""
    medians: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2):
        for detect in (False, True) if turn else (True, False):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = LitTraining(Training(*size, 0.0))
                fit(module, rounds + 2, detect_anomaly=detect)
            started = module.started[1:]
            medians[detect].append(statistics.median(b - a for a, b in pairwise(started)))
    return statistics.mean(medians[True]) / statistics.mean(medians[False])


def shown(said: dict[str, Any], lines: int) -> str:
    """Return the last lines of the report, the first that somebody scrolling up would meet."""
    text = (
        "\n".join(part for part in (said["stdout"], *said["warnings"], said["raised"]) if part) or "(nothing)"
    )
    whole = text.splitlines()
    kept = whole[-lines:]
    head = [f"[{len(whole) - len(kept)} lines before]"] if len(whole) > len(kept) else []
    return "\n".join(f"    {line[:160]}" for line in head + kept)


def markdown(document: dict[str, Any]) -> str:
    """Return the table of docs/comparison.md: a row per tool, the cheapest first, and the measured machine."""
    ratios, said = document["cost"], document["said"]
    lines = ["| tool | stopped at step | step time, bare step = 1 |", "|---|---|---|"]
    for name in sorted(ratios, key=ratios.get):
        stop = said[name]["stopped_at_step"]
        lines.append(f"| {name} | {'never' if stop is None else stop} | {ratios[name]:.2f} |")
    width, depth = document["size"]
    about = (
        f"{depth} blocks of width {width}, {document['batch']} rows, bfloat16 autocast; the median of"
        f" {document['rounds']} rounds, {document['threads']} threads of {document['cpu']}, torch {document['torch']}."
        f" The forward of step {document['first_bad_step']} is the first that is not finite."
    )
    return "\n".join([*lines, "", about])


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def write(path: str, text: str) -> None:
    """Write into the file, or to stdout for `-`."""
    if path == "-":
        sys.stdout.write(f"{text}\n")
    else:
        Path(path).write_text(f"{text}\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small model and few rounds: the words, not the costs"
    )
    parser.add_argument(
        "--lines", type=int, default=14, help="show so many of the last lines of each tool (14)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all of it as one JSON document, - for stdout")
    parser.add_argument("--markdown", metavar="FILE", help="write the table of costs, - for stdout")
    options = parser.parse_args(arguments)
    if options.json == options.markdown == "-":
        parser.error("--json - and --markdown - would be mixed on stdout; give one of them a file")
    size, rounds = ((16, 2), 2) if options.quick else ((512, 6), 15)

    found: dict[str, dict[str, Any]] = {}
    for name, tool in TOOLS.items():
        said, steps = failing_run(tool, size)
        found[name] = said | {"stopped_at_step": steps if said["raised"] else None}
    module = LitTraining(Training(*size, LEARNING_RATES[size[0]]))
    said = said_by(lambda: fit(module, MAX_STEPS, detect_anomaly=True))
    found["lightning detect_anomaly"] = said | {
        "stopped_at_step": len(module.started) - 1 if said["raised"] else None
    }
    ratios = cost(size, rounds)
    bad = first_bad_step(size)
    document = {
        "first_bad_step": bad, "size": size, "batch": ROWS, "rounds": rounds, "threads": torch.get_num_threads(),
        "cpu": processor(), "torch": str(torch.__version__), "said": found, "cost": ratios,
    }  # fmt: skip
    if options.json:
        write(options.json, json.dumps(document))
    if options.markdown:
        write(options.markdown, markdown(document))
    if "-" in (options.json, options.markdown):
        return
    print(f"The forward of step {bad} is the first that is not finite.\n")
    for name, said in found.items():
        stop = said["stopped_at_step"]
        print(
            f"{name}: {'did not stop' if stop is None else f'stopped at step {stop}'}, step time x {ratios[name]:.2f}"
        )
        print(shown(said, options.lines) + "\n")


if __name__ == "__main__":
    main()
