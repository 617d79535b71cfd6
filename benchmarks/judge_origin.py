"""Judge whether the origin of a failure is found in ordinary programs.

    python benchmarks/judge_origin.py                     # all of it, half an hour
    python benchmarks/judge_origin.py --sample 100        # one in a hundred
    python benchmarks/judge_origin.py -k "before a container" -v
    python benchmarks/judge_origin.py --only planted

Each fault of `origin/faults.txt` is written into each place of `origin/places.txt`. The finding should have the line,
the operation, and the module whose code made the value. Then a nan or an inf is planted in parameters and buffers of
the models of `origin/architectures.py`, and the finding should name the tensor. A program whose outputs and gradients
are finite without a watch, as where a mask hides the value, is not counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import linecache
import random
import re
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from origin.architectures import ARCHITECTURES
from torch import Tensor, nn

from nanwatch.diagnosis import rerun
from nanwatch.recording.observe import observe
from nanwatch.recording.walk import leaves
from nanwatch.report.finding import Finding
from nanwatch.report.report import NonFiniteError
from nanwatch.session.api import watch

_FOLDER = Path(__file__).parent / "origin"
_PARTS = ("line", "operation", "module")
_HEAD = """import dataclasses, functools, torch, torch.utils.checkpoint
import torch.nn.functional as F
from torch import nn
class Start(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.net = nn.Linear(16, 16, bias=False), nn.Sequential(nn.Linear(16, 16), nn.ReLU())
"""


class Program(NamedTuple):
    """A fault in a place: the source, the line that makes the value, the module whose code it is, and operations."""

    name: str
    phase: str
    source: str
    line: int
    module: str
    operations: list[str]


def _sections(file: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the parts of each heading of a file, and the lines below it."""
    for section in (_FOLDER / file).read_text().rstrip("\n").split("\n## ")[1:]:
        heading, *lines = section.split("\n")
        yield [part.strip() for part in heading.split("|")], lines


def programs() -> Iterator[Program]:
    """Yield each fault in each place whose package is there."""
    for (place, module, *package), lines in _sections("places.txt"):
        if any(importlib.util.find_spec(name) is None for name in package):
            continue
        at = next(i for i, line in enumerate(lines) if "FAULT(h)" in line)
        for (fault, operations), statements in _sections("faults.txt"):
            body = [re.sub("h = .*", "", lines[at]) + one.replace("  #!", "") for one in statements]
            if "lambda" in lines[at]:
                body = [lines[at].replace("FAULT(h)", statements[0].partition(" = ")[2])]
                if len(statements) > 1:
                    continue
            marked = next((i for i, statement in enumerate(statements) if "#!" in statement), 0)
            source = _HEAD + "\n".join([*lines[:at], *body, *lines[at + 1 :]]) + "\n"
            number = _HEAD.count("\n") + at + marked + 1
            maker = "" if module == "root" else module
            yield Program(f"{fault} {place}", fault.split(":")[0], source, number, maker, operations.split())


def _finding(model: nn.Module, run: Callable[[], Any], **options: Any) -> Finding | None:
    with watch(model, **options):
        try:
            run()
        except NonFiniteError as error:
            return error.report.finding
    return None


def judge_program(program: Program, folder: str) -> tuple[dict[str, bool], str]:
    """Return what is right in the finding of the program, and the finding in words; nothing without a failure."""
    path = Path(folder, "program.py")
    path.write_text(program.source)
    linecache.checkcache(str(path))
    module = sys.modules["program"] = types.ModuleType("program")
    exec(compile(program.source, str(path), "exec"), module.__dict__)
    torch.manual_seed(0)
    model = module.Model()
    batch = torch.randn(8, 16)
    batch[3] = 0
    is_backward = program.phase == "backward"

    def step() -> Tensor:
        output: Tensor = model(batch)
        if is_backward:
            output.square().sum().backward()  # type: ignore[no-untyped-call]
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        return output

    state = {name: x.clone() for name, x in model.state_dict().items()}
    made = [step()] if not is_backward else [step(), *model.parameters()]
    is_finite = [bool(torch.isfinite(x).all()) for x in made]
    if all(is_finite) or (is_backward and not is_finite[0]):
        return {}, "finite"
    model.zero_grad()
    model.load_state_dict(state)
    finding = _finding(model, step, gradients=is_backward)
    if finding is None:
        return dict.fromkeys(_PARTS, False), "no failure was seen"
    maker = finding.source_module if finding.origin == "received" else finding.module
    operation = (finding.operation or "").removeprefix("aten.").partition(".")[0].partition("Backward")[0]
    right = {
        "line": finding.source == f"{path}:{program.line}",
        "operation": re.sub("(?<=.)(?=[A-Z])", "_", operation).lower() in program.operations,
        "module": maker == program.module,
    }
    where = f"{finding.origin} `{finding.label}` of {finding.module!r}"
    return right, f"{finding.operation} at {finding.source}, by {maker!r} ({where})"


def judge_planted(name: str, chosen: random.Random, most: int) -> Iterator[tuple[bool, str]]:
    """Plant a nan or an inf in tensors of the model of this name. Yield whether each was named.

    A tensor that the model's outputs do not show and the watch does not name is left out.
    """
    torch.manual_seed(0)
    model, args, kwargs = ARCHITECTURES[name]()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names: dict[Tensor, set[str]] = {}
    for key, x in named:
        if x.is_floating_point() and x.numel():
            names.setdefault(x, set()).add(key)
    for x in chosen.sample(list(names), min(most, len(names))):
        state = {key: kept.detach().clone() for key, kept in named}
        value = chosen.choice(["nan", "inf"])
        with torch.no_grad():
            x[tuple(map(chosen.randrange, x.shape))] = float(value)
        output = model(*args, **kwargs)
        fails = any(observe(y, label, "output").is_fault for label, y in leaves(output, "output"))
        torch.manual_seed(1)
        finding = _finding(model, lambda: model(*args, **kwargs))
        with torch.no_grad():
            for key, kept in named:
                kept.copy_(state[key])
        if finding is None and not fails:
            continue
        said = "" if finding is None else ".".join(filter(None, (finding.module, finding.label)))
        is_named = finding is not None and finding.origin in ("weight", "buffer") and said in names[x]
        yield is_named, f"{value} in {min(names[x])} of {name}: {said or 'no failure was seen'}"


def judge(word: str, sample: int, tensors: int, only: str, seed: int, say: Any) -> dict[str, tuple[int, int]]:
    """Return how many were right and how many were judged, for each part of the score. `say` what is wrong."""
    chosen, score = random.Random(seed), Counter[tuple[str, bool]]()

    def count(parts: dict[str, bool], words: str) -> None:
        score.update(parts.items())
        if wrong := [part for part, is_right in parts.items() if not is_right]:
            say(f"{', '.join(wrong)}: {words}")

    # The cures have their own judge.
    steps = mock.patch.multiple(rerun._Rerun, _cure=mock.DEFAULT, _find_samples=mock.DEFAULT)
    with tempfile.TemporaryDirectory() as folder, steps, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program in programs() if only != "planted" else ():
            is_due = word in program.name and program.phase in (only or program.phase)
            if is_due and not chosen.randrange(sample):
                parts, words = judge_program(program, folder)
                count(
                    {f"{program.phase} {part}": right for part, right in parts.items()},
                    f"{program.name}: {words}",
                )
        for name in ARCHITECTURES if only in ("", "planted") else ():
            most = sum(not chosen.randrange(sample) for _ in range(tensors))
            for is_named, words in judge_planted(name, chosen, most) if word in name and most else ():
                count({"planted tensor": is_named}, words)
    parts = dict.fromkeys(part for part, _ in score)
    return {part: (score[part, True], score[part, True] + score[part, False]) for part in parts}


def main() -> None:
    """Judge the programs and the planted tensors that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-k", metavar="WORD", default="", help="only programs and models with this in their name"
    )
    parser.add_argument("-v", action="store_true", help="print each that is wrong")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="judge one in N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tensors", type=int, default=8, help="tensors of each model that a value is planted in"
    )
    parser.add_argument("--only", choices=["forward", "backward", "planted"], default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    say = print if options.v else lambda words: None
    score = judge(options.k, options.sample, options.tensors, options.only, options.seed, say)
    for part, (right, judged) in score.items():
        print(f"{part:<20} {right:>5} of {judged:>5}  {right / judged:.1%}")


if __name__ == "__main__":
    main()
