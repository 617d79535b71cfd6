"""Does a re-run leave a trace? Programs with side effects, each run unwatched and watched, and compared.

Each program of `reruns/` runs twice in processes of its own. Unwatched it skips a bad batch as a user's own check
would. Watched it catches NonFiniteError and goes on. A case is right if

- the program ended in the same way and in time, with the same state, output and process state, and left no process;
- the finding has the operation, and the line that is marked `# FAULT` in the program. A remark that names a line
  marked `# ONCE` may stand in for them and for the cure where the program does something that nobody can take back;
- where the case asks for a cure: a patch that works applies, and the patched program has no bad batch.

    python benchmarks/judge_reruns.py                       # a line a case, and the score
    python benchmarks/judge_reruns.py -k lock --verbose     # some of them, with what differs and the reports
    python benchmarks/judge_reruns.py --jobs 2 --json reruns.json
    python benchmarks/judge_reruns.py --in-process          # re-runs without a child, as with CUDA
    python benchmarks/judge_reruns.py --validate            # are the programs themselves right? no watch at all

Processes are forked from one that has imported torch and has computed nothing. `--fresh` starts new interpreters (2 s
more each).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from _program_runs import HERE, Outcome, load, run_forked, run_fresh
from reruns.case import CASES, Case

import nanwatch

LIMIT = 40.0  # seconds for a program that takes less than two


@dataclass
class Verdict:
    """The judgement of one case; `state` and the others say what is wrong, or "same", "right" or "-"."""

    name: str
    state: str
    operation: str
    line: str
    cure: str
    seconds: float
    details: str = ""

    @property
    def is_right(self) -> bool:
        return self.state == "same" and all(
            one in ("right", "remark", "-") for one in (self.operation, self.line, self.cure)
        )

    def __str__(self) -> str:
        mark = "ok  " if self.is_right else "FAIL"
        cells = f"state {self.state}", f"op {self.operation}", f"line {self.line}", f"cure {self.cure}"
        return f"{mark} {self.name:38} {' | '.join(cells)} | {self.seconds:.1f} s"


def judge(one: Case, *, in_process: bool = False, fresh: bool = False, limit: float = LIMIT) -> Verdict:
    """Run the case unwatched and watched, and compare."""
    began = time.monotonic()
    run = run_fresh if fresh else run_forked
    with tempfile.TemporaryDirectory() as folder:
        plain = run(one, Path(folder, "plain"), watched=False, in_process=False, limit=limit)
        watched = run(one, Path(folder, "watched"), watched=True, in_process=in_process, limit=limit)
        state = _compare(plain, watched)
        operation, line, finding = _judge_finding(one, watched, in_process)
        is_due = one.cure and operation != "remark"
        cure = _judge_cure(one, finding, Path(folder, "cured"), limit) if is_due else "-"
    details = state if state == "same" else f"{state}\n{_differences(plain, watched)}"
    details += f"\n{watched.errors[-1500:]}\n" + "\n".join(x.get("text", "") for x in watched.findings)
    return Verdict(one.name, state, operation, line, cure, time.monotonic() - began, details)


def validate(one: Case, *, limit: float = LIMIT) -> str:
    """Return "" if the program, unwatched, meets its fault and does the same twice; else what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (
            run_forked(one, Path(folder, name), watched=False, in_process=False, limit=limit)
            for name in ("first", "second")
        )
    if first.status == "hangs" or not first.state:
        return f"{first.status}, state {first.state}\n{first.errors[-1000:]}"
    if first.bad == 0:
        return "no bad batch"
    if not _marks(one, "FAULT") and one.operation:
        return "no line is marked"
    return "" if _compare(first, second) == "same" else _differences(first, second)


def _compare(plain: Outcome, watched: Outcome) -> str:
    if plain.status == "hangs" or watched.status == "hangs":
        return "hangs" if watched.status == "hangs" else "hangs unwatched"
    if plain.status != watched.status:
        return f"ends by {watched.status} for {plain.status}"
    wrong = [
        key for key in {**plain.state, **watched.state} if plain.state.get(key) != watched.state.get(key)
    ]
    wrong += [key for key in plain.process if plain.process[key] != watched.process.get(key)]
    wrong += ["bad batches"] * (plain.told != watched.told)
    wrong += ["output"] * (plain.output != watched.output)
    wrong += ["processes left"] * (watched.left > plain.left)
    return "same" if not wrong else "DIFFERS in " + ", ".join(sorted(wrong))


def _differences(plain: Outcome, watched: Outcome) -> str:
    lines = [
        f"  status: {plain.status} unwatched, {watched.status} watched; told {plain.told}, {watched.told}"
    ]
    for kind in ("state", "process"):
        ours, theirs = getattr(plain, kind), getattr(watched, kind)
        lines += [
            f"  {key}: {str(ours.get(key))[:300]} unwatched, {str(theirs.get(key))[:300]} watched"
            for key in {**ours, **theirs}
            if ours.get(key) != theirs.get(key)
        ]
    if plain.output != watched.output:
        lines.append(f"  output: {plain.output[-300:]!r} unwatched, {watched.output[-300:]!r} watched")
    return "\n".join(lines)


def _judge_finding(one: Case, watched: Outcome, in_process: bool) -> tuple[str, str, dict[str, Any] | None]:
    """Return what is to be said of operation and line, and the finding."""
    if not one.finding:
        return "-", "-", None
    finding = next((x for x in watched.findings if x), None)
    if finding is None:
        return "no finding", "no finding", None
    if not one.operation:
        return "-", "-", finding
    operation = finding["operation"] or "none"
    is_operation = bool(re.search(one.operation, operation, re.IGNORECASE))
    name, _, line = (finding["source"] or "").rpartition(":")
    is_line = Path(name).name == one.file.name and line in map(str, _marks(one, "FAULT"))
    if is_operation and is_line:
        return "right", "right", finding
    may_remark = in_process if one.once == "in-process" else one.once
    if may_remark and _named(one, finding["remarks"]):
        return "remark", "remark", finding
    return "right" if is_operation else operation, "right" if is_line else line or "none", finding


def _named(one: Case, remarks: Sequence[str]) -> bool:
    """Return whether a remark names one of the lines that are marked `# ONCE`."""
    lines = "|".join(map(str, _marks(one, "ONCE")))
    return any(re.search(rf"(\bline |\.py:)({lines})\b", one) for one in remarks)


def _judge_cure(one: Case, finding: dict[str, Any] | None, folder: Path, limit: float) -> str:
    """Apply the first patch that works to a copy of the programs, and run the case of the copy."""
    cures = [] if finding is None else [x for x in finding["cures"] if x["works"]]
    if not cures:
        return "none"
    patch = next((x["patch"] for x in cures if x["patch"]), "")
    if not patch:
        return "no patch"
    top = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--show-toplevel"], capture_output=True, text=True
    ).stdout.strip()
    copy = folder / "copy" / HERE.relative_to(top or HERE.parent)
    shutil.copytree(HERE / "reruns", copy / "reruns")
    apply = ["git", "apply", "--whitespace=nowarn", "-"]
    done = subprocess.run(apply, cwd=folder / "copy", input=patch, capture_output=True, text=True)
    if done.returncode:
        return "does not apply"
    cured = run_forked(one, folder / "run", watched=False, in_process=False, limit=limit, programs=copy)
    if cured.status == "hangs" or cured.status != "returned":
        return f"ends by {cured.status}"
    return "right" if cured.bad == 0 else "still bad"


def _marks(one: Case, mark: str) -> list[int]:
    """Return the lines with this mark: of this case's name, or between the case before it and its own end."""
    text = one.file.read_text(encoding="utf-8").splitlines()
    end = len(text) if one.script else _end(one)
    others = [] if one.script else [_end(x) for x in CASES.values() if x.file == one.file]
    begin = max((x for x in others if x < end), default=0)
    found = []
    for number, line in enumerate(text, 1):
        _, is_marked, pattern = line.partition(f"# {mark}")
        if is_marked and (fnmatch(one.name, pattern.strip()) if pattern.strip() else begin < number <= end):
            found.append(number)
    return found


def _end(one: Case) -> int:
    """Return the last line of the case's function."""
    code = one.function.__code__
    pending, last = [code], 0
    while pending:
        code = pending.pop()
        last = max(last, *(line for _, _, line in code.co_lines() if line))
        pending += [x for x in code.co_consts if hasattr(x, "co_lines")]
    return last


def each_judged(cases: Sequence[Case], jobs: int, do: Callable[[Case], Any]) -> Iterator[Any]:
    """Call `do` for each case in a process of its own, `jobs` at a time; yield the results as they come."""
    running: dict[int, Path] = {}
    with tempfile.TemporaryDirectory() as folder:

        def result() -> Any:
            pid, _ = os.wait()
            file = running.pop(pid)
            return json.loads(file.read_text(encoding="utf-8"))

        for number, one in enumerate(cases):
            if len(running) >= jobs:
                yield result()
            file = Path(folder, str(number))
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                try:
                    file.write_text(json.dumps(do(one)), encoding="utf-8")
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(0)
            running[pid] = file
        while running:
            yield result()


def main() -> None:
    """Judge the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "-k", metavar="WORD", action="append", help="only cases with this in their name or file"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="cases at a time (2)")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="S", help="seconds for a run (40)")
    parser.add_argument("--in-process", action="store_true", help="watch with NANWATCH_RERUN=in-process")
    parser.add_argument("--fresh", action="store_true", help="start a new interpreter for each run")
    parser.add_argument("--validate", action="store_true", help="check the programs, unwatched")
    parser.add_argument("--verbose", action="store_true", help="print what differs, and the reports")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there")
    given = parser.parse_args()
    words = given.k or [""]
    cases = [x for x in load().values() if any(word in f"{x.file.stem}.{x.name}" for word in words)]
    if given.validate:
        texts = list(each_judged(cases, given.jobs, lambda x: (x.name, validate(x, limit=given.limit))))
        for name, text in texts:
            print(f"{name}: {text or 'ok'}")
        print(f"{sum(not text for _, text in texts)} of {len(texts)} programs are right")
        return
    print(f"judging {Path(nanwatch.__file__).parent}")
    verdicts = []
    how = {"in_process": given.in_process, "fresh": given.fresh, "limit": given.limit}
    for facts in each_judged(cases, given.jobs, lambda x: asdict(judge(x, **how))):
        verdicts.append(Verdict(**facts))
        print(verdicts[-1], flush=True)
        if given.verbose:
            print(verdicts[-1].details, flush=True)
    print(f"{sum(one.is_right for one in verdicts)} of {len(verdicts)}")
    if given.json:
        given.json.write_text(json.dumps([{**asdict(x), "right": x.is_right} for x in verdicts], indent=1))


if __name__ == "__main__":
    main()
