"""`nanwatch.twice`: run a script twice, compare bit for bit, and try what makes the runs equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..trace.comparison import Comparison, Place
from ..util.messages import Tell, first_few, plural, silent, spell
from .recording import TRIALS, Recording, TensorPrint

# Has the request in a process that makes one of the runs.
VARIABLE = "NANWATCH_TWICE"
# Runs beside the first two that have to be equal too before a change is said to make the runs equal.
_CONFIRMING = 2
_MOST_TRIALS = 5
_UNKNOWN = (
    "no change that was tried made the runs equal: look at threads that end in any order, other processes, id(),"
    " listings of files, unwritten memory, and files that a run leaves changed"
)
# Place in the first run of the first tensor that differs, and the tensor in both.
_Difference = tuple[int, TensorPrint, TensorPrint | None]
# Makes a run under some trials, of at most so many batches.
_Run = Callable[[Sequence[str], int | None], Recording]


def twice(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    batches: int | None = None,
    times: int = 2,
    tell: Tell = silent,
) -> Comparison:
    """Run a script twice, say whether it computes the same, bit for bit, and where and why it does not.

    Args:
        script: a Python file, or with `is_module` the name of a module, which runs as `python -m` does.
        arguments: the script's own arguments.
        is_module: whether `script` is the name of a module.
        batches: end each run after so many calls of the model; None runs to the end.
        times: number of runs to compare, at least 2.
        tell: called with the progress.

    Each run is a process of its own with the same arguments and environment. Modules' weights, buffers, inputs, outputs
    and gradients, and the weights after each optimizer step, are compared by `nanwatch.fingerprint`. Where the runs
    part, the result names the first tensor that differs, and changes are tried, at most five, that take one source of
    chance away each (seeds, the order of the data, a clock, threads, ...), until the runs are equal.

    Takes 2 runs of a script that is repeatable, some 6 to 14 of one that is not. Raises RuntimeError for a script that
    fails or calls no module.

    >>> import nanwatch
    >>> result = nanwatch.twice("train.py", ["--lr", "0.1"], batches=10)  # doctest: +SKIP
    >>> print(result.to_text())  # doctest: +SKIP
    Repeatable: 2 runs of train.py are bit-equal.
    """
    for option, number, least in (("times", times, 2), ("batches", batches, 1)):
        if number is not None and number < least:
            raise ValueError(f"{option} should be at least {least}, got {number}")
    command = [*(["-m"] if is_module else []), os.fspath(script), *arguments]
    name = os.path.basename(script)
    with tempfile.TemporaryDirectory(prefix="nanwatch-twice-") as folder:
        run = partial(_run, command, name, Path(folder, "run.json"))
        first, difference = _compared(run, (), batches, times, tell)
        if difference is None and first.error:
            raise RuntimeError(f"the runs are bit-equal, but each ended by {first.error}")
        facts = [] if difference is None else _facts(run, difference, batches, tell)
    unread = [f"{tensor.label}: {tensor.form}" for tensor in first.tensors if "not compared" in tensor.form]
    remarks = [f"{len(unread):,} tensors could not be compared, the first {words}" for words in unread[:1]]
    remarks += [f"the run ended by {first.error}"] if first.error else []
    headline, place = f"Repeatable: {times} runs of {name} are bit-equal", None
    if difference is not None:
        tensor = difference[1]
        headline = f"Not repeatable: the runs of {name} part in batch {tensor.batch}"
        names = tensor.module, tensor.module, tensor.class_name, tensor.class_name
        place = Place(*names, tensor.label, tensor.batch, tensor.kind)
    counts = plural(first.batches, "batch", "batches"), plural(len(first.tensors), "tensor")
    compared = f"{', '.join(counts)} in each run"
    return Comparison(difference is None, headline, place, tuple(facts), compared, tuple(remarks))


def _facts(run: _Run, difference: _Difference, batches: int | None, tell: Tell) -> list[tuple[str, str]]:
    """Return the first difference in words, its cause and what was tried."""
    place, tensor, counterpart = difference
    before = f"after {place:,} equal ones" if place else "the first of all"
    facts = [("First", f"{tensor.where}, {tensor.form}, {before}")]
    if tensor.thread:
        facts.append(("", f"in a thread {tensor.thread}; those of the other run have no such bits"))
    elif counterpart is None or counterpart.where != tensor.where:
        has = "nothing" if counterpart is None else counterpart.where
        facts.append(("", f"where the other run has {has}"))
    # Another thread may get there at any batch of the model. The end of a backward is waited for.
    is_in_order = not tensor.thread or tensor.kind == "gradient"
    tried, cause = _try(run, place, tensor.batch + 1 if is_in_order else batches, tell)
    is_dropout = "Dropout" in tensor.class_name and tensor.kind == "output"
    facts.append(("Cause", f"dropout. {cause}" if is_dropout else cause))
    return facts + [("Tried", words) for words in tried]


def _try(run: _Run, place: int, most_batches: int | None, tell: Tell) -> tuple[list[str], str]:
    """Make runs under trials until one makes them equal. Return what was tried, and the cause, in words.

    A trial after which the runs part later has cured one cause of several, so it stays for the trials behind it.
    """
    tried: list[str] = []
    kept: tuple[str, ...] = ()
    left = list(TRIALS)
    while left and len(tried) < _MOST_TRIALS:
        names = (*kept, left.pop(0))
        change = " and ".join(TRIALS[name].change for name in names)
        tell(f"trying {change}")
        try:
            first, remaining = _compared(run, names, most_batches, 2 + _CONFIRMING, tell)
        except Exception as error:  # torch names operations that have no deterministic kernel in this way
            tried.append(f"failed: {change} ({spell(error)})")
            continue
        if remaining is None:
            tried.append(f"bit-equal with {change}")
            causes = "; ".join(TRIALS[name].cause for name in names)
            calls = first_few(list(dict.fromkeys(first.notes)), 3)
            many = f"{len(names)} causes: " if len(names) > 1 else ""
            return tried, f"A trial shows {many}{causes}{calls and f': {calls}'}"
        tried.append(f"no help: {change}")
        if remaining[0] > place:
            place, kept = remaining[0], names
            left = [name for name in TRIALS if name not in kept]
    return tried, _UNKNOWN


def _compared(
    run: _Run, trials: Sequence[str], most_batches: int | None, times: int, tell: Tell
) -> tuple[Recording, _Difference | None]:
    """Make runs until one differs from the first. Return the first, and the difference."""
    under = " under a trial" if trials else ""
    tell(f"making run 1{under}")
    first, difference = run(trials, most_batches), None
    for number in range(2, times + 1):
        if difference is None:
            tell(f"making run {number}{under}")
            difference = _first_difference(first, run(trials, most_batches))
    return first, difference


def _first_difference(a: Recording, b: Recording) -> _Difference | None:
    """Return the first tensor of `a` that `b` has otherwise.

    The main thread's are compared in order, and those of other threads as a bag: their order is not the program's, nor
    how far one got before the end. Batches and names may depend on that order, so they are not compared.
    """
    bag_a, bag_b = (Counter(tensor.content for tensor in run.tensors if tensor.thread) for run in (a, b))
    lacking = bag_a - bag_b if bag_b - bag_a else Counter()
    in_order = iter([tensor for tensor in b.tensors if not tensor.thread])
    for place, tensor in enumerate(a.tensors):
        counterpart = None if tensor.thread else next(in_order, None)
        content = counterpart and counterpart.content
        if tensor.content in lacking if tensor.thread else tensor.content != content:
            return place, tensor, counterpart
    more = next(in_order, None)
    return None if more is None else (len(a.tensors), more, None)


def _run(
    command: Sequence[str], name: str, file: Path, trials: Sequence[str], most_batches: int | None
) -> Recording:
    """Run the script in a process and return its recording. Raise RuntimeError where there is nothing to compare."""
    file.unlink(missing_ok=True)
    request = json.dumps({"trials": trials, "most_batches": most_batches, "file": str(file)})
    # A watch in the script would be before the calls that are to be recorded.
    environment = {**os.environ, "NANWATCH": "0", VARIABLE: request}
    for trial in trials:
        environment |= TRIALS[trial].environment
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    interpreter = [sys.executable, *flags, "-m", "nanwatch", "twice", *command]
    done = subprocess.run(interpreter, env=environment, capture_output=True, text=True, errors="replace")
    last = done.stderr.strip().rpartition("\n")[2] or "it printed nothing on stderr"
    if not file.exists():
        raise RuntimeError(f"the script ended by status {done.returncode}: {last}")
    recording = Recording(**json.loads(file.read_text(encoding="utf-8")))
    if recording.error.startswith("exit status"):
        recording.error += f" ({last})"
    recording.tensors = [TensorPrint(*values) for values in recording.tensors]
    if len(recording.tensors) == bool(recording.error):
        why = recording.error or "it called no module and made no optimizer step in its own process"
        raise RuntimeError(f"there is nothing to compare in {name}: {why}")
    if recording.error and trials:
        raise RuntimeError(recording.error)
    return recording
