"""`nanwatch.twice`: run a step twice from the same state, compare bit for bit, and try what makes the runs equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from torch import nn

from ..instrumentation.slot import wrappers
from ..trace.result import Result, plural
from ..util.modules import each_module
from ..util.progress import Tell, silent
from ..util.visible import first_few, module_name, spell
from .recording import Recorder, Recording, TensorPrint
from .snapshot import Snapshot, stateful
from .trials import TRIALS, Trial

# Runs beside the first two that have to be equal too before a change is said to make the runs equal.
_CONFIRMING = 2
_MOST_TRIALS = 5
_UNKNOWN = (
    "no change that was tried made the runs equal: look at threads that end in any order, other processes, id(),"
    " listings of files, unwritten memory, and files and objects that a run leaves changed"
)
# Makes a run under some trials, of at most so many batches.
Run = Callable[[Sequence[str], int | None], Recording]
# Place in the first run, and the tensor in both.
_FirstTensor = tuple[int, TensorPrint, "TensorPrint | None"]


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """First tensor that two runs do not have alike.

    `where` is the tensor in words. `kind`, `module`, `class_name`, `label` and `form` are those of TensorPrint.
    `equal_before` counts the tensors that were equal up to there. `other` is what the other run has in its place, ""
    for the same tensor with other bits. `cause` is what made the difference, in words.
    """

    batch: int
    kind: str
    module: str
    class_name: str
    label: str
    form: str
    where: str
    equal_before: int
    other: str
    cause: str


@dataclass(frozen=True, slots=True)
class Tried:
    """A change that was tried, and how the runs came out: "equal", "differ", or "failed" with the reason.

    `change` is code or words; `where` is the first difference that is left, or the error.
    """

    change: str
    outcome: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Repetition(Result):
    """Result of `nanwatch.twice`.

    `difference` has the first tensor that was not bit-equal in all runs, with its cause, and `tried`
    the changes that were tried; those that made the runs bit-equal have the outcome "equal". `tensors` counts the
    compared tensors and numbers of a run. `error` is the exception that ended the runs, in words.
    """

    what: str
    runs: int
    batches: int
    tensors: int
    difference: FirstDifference | None = None
    tried: tuple[Tried, ...] = ()
    remarks: tuple[str, ...] = ()
    error: str = ""

    @property
    def equal(self) -> bool:
        """True when all runs were bit-equal."""
        return self.difference is None

    @property
    def headline(self) -> str:
        """The result in a line."""
        if self.difference is None:
            return f"Repeatable: {self.runs} runs of {self.what} are bit-equal"
        return f"Not repeatable: the runs of {self.what} part in batch {self.difference.batch}"

    @property
    def amount(self) -> str:
        """The number of compared tensors."""
        return f"{plural(self.batches, 'batch', 'batches')}, {plural(self.tensors, 'tensor')} in each run"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The first difference, its cause, and what was tried."""
        first = self.difference
        if first is None:
            return []
        before = f"after {first.equal_before:,} equal ones" if first.equal_before else "the first of all"
        facts = [("First", f"{first.where}, {first.form}, {before}")]
        if first.other:
            facts.append(("", f"where the other run has {first.other}"))
        facts.append(("Cause", first.cause))
        outcomes = {"equal": "bit-equal with", "differ": "no help:", "failed": "failed:"}
        for trial in self.tried:
            why = f" ({trial.where})" if trial.outcome == "failed" else ""
            facts.append(("Tried", f"{outcomes[trial.outcome]} {trial.change}{why}"))
        return facts


def twice(
    step: Callable[..., Any],
    *,
    batches: Iterable[Any] | None = None,
    state: Sequence[object] | None = None,
    times: int = 2,
) -> Repetition:
    """Run a step twice from the same state and random numbers, and say whether it computes the same, bit for bit.

    Args:
        step: a function that trains or evaluates: forward, and where wanted backward and optimizer step.
        batches: call `step(batch)` for each of these, in both runs; without it `step()` is called once.
        state: modules, optimizers, schedulers, scalers, generators and tensors to put back before each run. By default
            the modules, optimizers and objects with `state_dict()` that `step` refers to: in its closure, its globals,
            the object that it is a method of.
        times: number of runs to compare.

    Modules' weights, buffers, inputs, outputs and gradients, the weights after each optimizer step and what `step`
    returns are compared by `nanwatch.fingerprint`. Where the runs part, the first tensor that differs names the module,
    and changes are tried, at most five, that take one source of chance away each (seeds, a clock, threads, ...), until
    the runs are equal.

    Afterwards the state, with the attributes of modules, and random states are as before the call. Other objects of the
    program that `step` changes are as the runs leave them. Takes 2 runs of the step when it is repeatable, some 6 to 14
    when it is not. Raises what `step` raises.

    >>> import nanwatch, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
    >>> print(nanwatch.twice(lambda: model(torch.ones(2, 4)).sum()).headline)
    Repeatable: 2 runs of the step are bit-equal
    """
    if not callable(step):
        raise TypeError(
            f"step should be a function that runs what is to be compared, got {type(step).__name__}"
        )
    if times < 2:
        raise ValueError(f"times should be at least 2, the number of runs that are compared, got {times}")
    arguments = [()] if batches is None else [(batch,) for batch in batches]
    objects = stateful(step) if state is None else state
    for root in objects:
        for name, module in each_module(root) if isinstance(root, nn.Module) else ():
            if wrappers(module):
                watched = f"{module_name(name)} is watched"
                raise ValueError(f"{watched}, so its calls cannot be followed; stop the watch before")
    snapshot = Snapshot(objects)

    def run(names: Sequence[str], most_batches: int | None) -> Recording:
        snapshot.restore()
        recorder = Recorder(roots=snapshot.modules)
        calls = arguments[:most_batches]
        with ExitStack() as patches:
            for name in names:
                patches.enter_context(TRIALS[name].patch(recorder.recording.notes.append))
            with recorder.running() as recording:
                for recorder.batch, values in enumerate(calls):
                    recorder.add(step(*values), "result", "result")
        recording.batches = len(calls)
        return recording

    with snapshot.kept():
        trials = {name: trial for name, trial in TRIALS.items() if not trial.for_scripts}
        return examine(run, "the step", times, trials)


def examine(run: Run, what: str, times: int, trials: dict[str, Trial], tell: Tell = silent) -> Repetition:
    """Compare `times` runs. Where they part, try the trials."""
    first, parted = _compared(run, (), None, times, tell)
    remarks = [f"the run ended by {first.error}"] if first.error else []
    if unread := [tensor for tensor in first.tensors if "not compared" in tensor.form]:
        label, form = unread[0].label, unread[0].form
        remarks.insert(0, f"{len(unread):,} tensors could not be compared, the first {label}: {form}")
    result = Repetition(
        what, times, first.batches, len(first.tensors), remarks=tuple(remarks), error=first.error
    )
    if parted is None:
        return result
    tried, cause = _try(run, trials, parted, tell)
    place, tensor, counterpart = parted
    if "Dropout" in tensor.class_name and tensor.kind == "output":
        cause = f"dropout. {cause}"
    has = "nothing" if counterpart is None else "" if counterpart.where == tensor.where else counterpart.where
    difference = FirstDifference(*tensor[:6], tensor.where, place, has, cause)
    return replace(result, difference=difference, tried=tuple(tried))


def _compared(
    run: Run, names: Sequence[str], most_batches: int | None, times: int, tell: Tell = silent
) -> tuple[Recording, _FirstTensor | None]:
    """Make runs until one differs from the first. Return the first, and the difference."""
    tell("making run 1")
    first = run(names, most_batches)
    for number in range(2, times + 1):
        tell(f"making run {number}")
        parted = _first_difference(first, run(names, most_batches))
        if parted is not None:
            return first, parted
    return first, None


def _first_difference(a: Recording, b: Recording) -> _FirstTensor | None:
    """Return the first print of `a` that `b` has otherwise.

    Threads are compared each by itself, because their order among each other is not the program's.
    """
    firsts: list[_FirstTensor] = []
    for name in dict.fromkeys(tensor.thread for tensor in (*a.tensors, *b.tensors)):
        places = [(i, tensor) for i, tensor in enumerate(a.tensors) if tensor.thread == name]
        counterparts = [tensor for tensor in b.tensors if tensor.thread == name]
        for place, counterpart in zip_longest(places, counterparts):
            if place is None:
                firsts.append((len(a.tensors), counterpart, None))
            elif place[1] != counterpart:
                firsts.append((*place, counterpart))
            else:
                continue
            break
    return min(firsts, key=lambda first: first[0], default=None)


def _try(run: Run, trials: dict[str, Trial], parted: _FirstTensor, tell: Tell) -> tuple[list[Tried], str]:
    """Make runs under trials until one makes them equal. Return what was tried, and the cause in words.

    A trial after which the runs part later has cured one cause of several, so it stays for the trials behind it.
    """
    place, batch = parted[0], parted[1].batch
    done: list[Tried] = []
    kept: tuple[str, ...] = ()
    left = list(trials)
    while left and len(done) < _MOST_TRIALS:
        using = (*kept, left.pop(0))
        change = " and ".join(trials[name].change for name in using)
        tell(f"trying {change}")
        try:
            first, remaining = _compared(run, using, batch + 1, 2 + _CONFIRMING)
        except Exception as error:  # torch names operations that have no deterministic kernel in this way
            done.append(Tried(change, "failed", spell(error)))
            continue
        if remaining is None:
            done.append(Tried(change, "equal"))
            causes = "; ".join(trials[name].cause for name in using)
            calls = first_few(list(dict.fromkeys(first.notes)), 3)
            many = f"{len(using)} causes: " if len(using) > 1 else ""
            return done, f"A trial shows {many}{causes}{calls and f': {calls}'}"
        done.append(Tried(change, "differ", remaining[1].where))
        if remaining[0] > place:
            place, kept = remaining[0], using
            left = [name for name in trials if name not in kept]
    return done, _UNKNOWN
