"""Compare what nanwatch says of each program with the truth, each in a process forked from one that has run nothing.

    python tests/programs/judge.py                    # a line a program, and a count for each column
    python tests/programs/judge.py softplus           # the programs with this in their name, with the reports
    python tests/programs/judge.py --threads          # the trainings rebuilt from public threads
    python tests/programs/judge.py --json

Columns: `module` (the whole place of the finding), `operation`, `line`, `cure` (one works, and all that are said to
work do when a user applies them: the run is then finite, and its loss and outputs within 1 % of float64, where that is
finite), `sound` (no cure that is said to work does harm), `quiet` (nothing is said of a healthy program, and its
results are bit-equal), `audit` (the cause and the module of a training that goes wrong in silence).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks"), str(ROOT / "python")]

import silent.case
import silent.process
import silent.score
import silent.tools.nanwatch  # also imports what a watch and a step import, for all processes
import torch
from torch import Tensor
from torch.utils import _pytree

import nanwatch
import nanwatch.capsule.capsule
import nanwatch.diagnosis.rerun
import programs.threads  # noqa: F401 - enters its programs
from nanwatch.report.finding import Cure, Finding
from programs import failing, reported, shapes  # noqa: F401 - enter their programs
from programs.case import CASES, THREADS, Case, Setup, finite, follow
from programs.healthy import HEALTHY

COLUMNS = "sound", "module", "operation", "line", "cure", "quiet", "audit"
# A cure may move a result by this part of its norm from that of float64. Formats of 16 bits have 2 to 3 digits.
_MOST_CHANGE = 0.01
_LIMIT = 120  # seconds for a program that takes less than two
# The trainings of benchmarks/silent with several ranks. tests/programs/silent has the kinds with one rank.
SILENT = "forward_around_ddp", "sequence_parallel_norms", "reduced_over_one_rank"
Verdict = dict[str, Any]


def _finding_of(setup: Setup) -> tuple[Finding | None, str]:
    """Return what nanwatch says of a run: the finding and the report."""
    with nanwatch.watch(setup.model, gradients=setup.loss is not None or setup.objective is not None):
        try:
            setup.run()
        except nanwatch.NonFiniteError as error:
            return error.report.finding, error.report.to_text()
    return None, "says nothing"


def judge_failure(case: Case) -> Verdict:
    """Judge the finding of a program that fails. Where its module is not known, judge the line and the cures."""
    setup = case.build()
    finding, text = _finding_of(setup)
    if finding is None:
        return dict.fromkeys(("module", "operation", "line", "cure"), False) | {"sound": True, "text": text}
    verdict: Verdict = {"text": text}
    if case.module is not None:
        verdict |= {"module": _has_place(case, finding), "operation": _has_operation(case, finding, setup)}
    if case.operations or case.module is None:
        verdict["line"] = (finding.source or "").endswith(f"{case.file.name}:{case.line}")
        faults = [_fault_of(case, cure) for cure in finding.cures if cure.works]
        verdict["sound"] = not any(faults)
        verdict["cure"] = bool(faults) and verdict["sound"]
        verdict["text"] += "".join(f"\nFAULT of a cure: {fault}" for fault in faults if fault)
    elif case.origin in ("weight", "buffer") and setup.loop is None:
        verdict["cure"] = not any(cure.works for cure in finding.cures)  # none may hide a bad weight
    return verdict


def _has_operation(case: Case, finding: Finding, setup: Setup) -> bool:
    if case.operations:
        name = _aten(finding.operation or "")
        return name in case.operations or f"{name}_" in case.operations
    # For bad data the finding names the operation that hands it on. A weight that a training spoils is made by the
    # step, which has cures of its own.
    by_step = setup.loop is not None and (finding.operation or "").startswith("the step of ")
    is_right = finding.operation is None or finding.origin == "data" or by_step
    return is_right and (finding.transient is True or not case.transient)


def _has_place(case: Case, finding: Finding) -> bool:
    if not case.label:  # the module whose code is at fault
        module = finding.module if finding.origin == "produced" else finding.source_module
        return ("-" if module is None else module) == case.module
    truth = case.module, case.label, case.origin, case.source_module, case.value
    return truth == (finding.module, finding.label, finding.origin, finding.source_module, finding.value)


def _aten(name: str) -> str:
    """Return the name in torch.ops.aten of `aten.div.Tensor`, or of the node `DivBackward0`."""
    if name.startswith("aten."):
        return name.split(".")[1].removesuffix("_")
    name = re.sub(r"Backward\d*$", "", name)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return {"softmax": "_softmax"}.get(name, name)


def _fault_of(case: Case, cure: Cure) -> str:
    """Apply a cure as a user would. Return what is wrong with the run under it, or nothing."""
    setup = case.build()
    if cure.patch:
        names = _patched(case.file, cure.patch)
        torch.manual_seed(0)
        setup = names.__dict__[case.name]()
    elif not follow(cure.what, setup):
        return f"nobody knows how to apply it: {cure.what}"
    results = setup.run()
    if not finite(results):
        return f"not finite: {cure.what}"
    exact = _in_float64(case)
    if setup.loss is not None or setup.objective is not None:
        results, exact = results[:1], exact and exact[:1]  # gradients need to be finite, and no more
    if exact is not None and (moved := _distance(results, exact)) > _MOST_CHANGE:
        return f"{moved:.2g} from float64: {cure.what}"
    return ""


def _patched(file: Path, patch: str) -> ModuleType:
    """Apply a patch by git to a copy of the file, and return the copy as a module."""
    (name,) = re.findall(r"^\+\+\+ b/(.*)$", patch, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder, name)
        copied.parent.mkdir(parents=True)
        copied.write_text(file.read_text())
        command = ["git", "apply", "--whitespace=nowarn", "-"]
        subprocess.run(command, cwd=folder, input=patch, text=True, check=True, capture_output=True)
        return _loaded(file, copied.read_text())


def _loaded(path: Path, text: str) -> ModuleType:
    """Return source text as a module of its own. Relative imports in it are those of `programs`."""
    names = ModuleType(f"text of {path.stem}")
    names.__package__ = "programs"
    sys.modules[names.__name__] = names  # where dataclasses look for annotations
    exec(compile(text, str(path), "exec"), names.__dict__)
    return names


def _in_float64(case: Case) -> Any:
    """Return the results of the program in float64, or None where none are finite or they are drawn at random."""
    setup = case.build()
    if setup.loop is not None or setup.steps > 1:
        return None
    state = torch.get_rng_state()
    try:
        results = setup.in_format(torch.float64).run()
    except (RuntimeError, TypeError):
        return None
    # No cure reaches what float32 cannot hold.
    in_range = finite(_pytree.tree_map_only(Tensor, Tensor.float, results))
    return results if in_range and torch.equal(state, torch.get_rng_state()) else None


def _distance(results: Any, exact: Any) -> float:
    """Return the largest distance of an output, or of the loss, from that of float64, as a part of its norm."""
    pairs = zip(_pytree.tree_leaves(results), _pytree.tree_leaves(exact), strict=True)
    distance = 0.0
    for result, truth in pairs:
        if isinstance(result, Tensor) and result.is_floating_point():
            norm = max(float(truth.norm()), 1e-6)
            distance = max(distance, float((result.double() - truth).norm()) / norm)
    return distance


def judge_healthy(name: str) -> Verdict:
    """Judge a healthy program: nothing is said, and it computes what it computes unwatched."""
    plain, watched = [], []
    for results, is_watched in ((plain, False), (watched, True)):
        torch.manual_seed(0)
        setup = HEALTHY[name]()
        watch = nanwatch.watch(setup.model, gradients=True) if is_watched else contextlib.nullcontext()
        with warnings.catch_warnings(record=True) as warned, watch as watch:
            try:
                results += [x for x in _pytree.tree_leaves(setup.run()) if isinstance(x, Tensor)]
            except nanwatch.NonFiniteError as error:
                return {"quiet": False, "text": error.report.to_text()}
    assert finite(plain), name
    is_equal = len(plain) == len(watched) and all(map(torch.equal, plain, watched))
    said = [str(warning.message) for warning in warned]
    is_quiet = watch.report().finding is None and not said
    return {"quiet": is_equal and is_quiet, "text": "\n".join([*said, watch.report().to_text()])}


def judge_silent(name: str) -> Verdict:
    """Judge what the audit says of a training that goes wrong in silence, and of its healthy form."""
    (case,) = (case for case in silent.case.load() if case.name == name)
    runs = {form: silent.process.run(case, form, "nanwatch") for form in ("faulty", "mended")}
    verdict = silent.score.judge(
        case, {form: [x for run in runs[form] for x in run.findings] for form in runs}
    )
    quiet = not verdict.alarms
    return {"audit": verdict.cause and verdict.module, "quiet": quiet, "text": f"{verdict}\n{runs}"}


def each_in_a_process(tasks: Sequence[Callable[[], Any]], jobs: int) -> Iterator[Any]:
    """Yield the result of each task in turn, each from a process of its own: a str is what it raised."""
    context = multiprocessing.get_context("fork")
    started: list[tuple[Any, Any]] = []
    for number in range(len(tasks)):
        while len(started) < min(number + jobs, len(tasks)):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(sender, tasks[len(started)]))
            process.start()
            sender.close()
            started.append((receiver, process))
        receiver, process = started[number]
        try:
            yield receiver.recv() if receiver.poll(_LIMIT) else f"took longer than {_LIMIT} s"
        except EOFError:
            yield "its process ended without a result"
        process.kill()
        process.join()


def _child(sender: Any, task: Callable[[], Any]) -> None:
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some programs print
    try:
        result = task()
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"
    sender.send(result)


def tasks(are_threads: bool) -> dict[str, Callable[[], Verdict]]:
    """Return what judges each program, by its name: the trainings of public threads, or all others."""
    judged: list[tuple[str, Callable[[], Verdict]]] = []
    for case in THREADS if are_threads else CASES:
        judged.append((case.name, partial(judge_failure, case)))
    others = (judge_healthy, HEALTHY), (judge_silent, SILENT)
    for judge, names in () if are_threads else others:
        judged += [(name, partial(judge, name)) for name in names]
    assert len(dict(judged)) == len(judged), "two programs have one name"
    return dict(judged)


def main() -> None:
    """Judge the programs that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="parts of names")
    parser.add_argument("--threads", action="store_true", help="judge the trainings of public threads")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    judged, words = tasks(options.threads), options.words or [""]
    chosen = {name: judged[name] for name in judged if any(word in name for word in words)}
    # Imports what a re-run imports. A patch that it tries enters the programs of its file anew.
    judge_failure(CASES[0])
    verdicts: dict[str, Verdict] = {}
    for name, verdict in zip(chosen, each_in_a_process(list(chosen.values()), options.jobs), strict=True):
        verdicts[name] = {"text": verdict} if isinstance(verdict, str) else verdict
        if not options.json:
            values = ((column, verdicts[name][column]) for column in COLUMNS if column in verdicts[name])
            marks = " ".join(f"{'' if value else 'NOT '}{column}" for column, value in values)
            print(f"{name:36} {marks or verdict}", flush=True)
            if options.words:
                print(verdicts[name]["text"])
    if options.json:
        print(json.dumps(verdicts))
        return
    for column in COLUMNS:
        values = [verdict[column] for verdict in verdicts.values() if column in verdict]
        print(f"{column:10} {sum(values)} of {len(values)}")


if __name__ == "__main__":
    main()
