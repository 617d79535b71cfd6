"""`nanwatch.twice`: run a step twice from the same state, compare bit for bit, and try what makes the runs equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..instrumentation.slot import wrappers
from ..util.modules import each_module
from ..util.progress import Tell, silent
from ..util.visible import module_name, spell
from .causes import explain
from .operations import OperationDifference, first_operation
from .reach import Leftovers, Reach
from .recording import Recorder, Recording, first_difference
from .repetition import FirstDifference, Repetition, Tried, operation_fields
from .state import State
from .trials import TRIALS, Trial

# Runs beside the first two that have to be equal too before a change is said to make the runs equal.
_CONFIRMING = 2


@dataclass(frozen=True, slots=True)
class Request:
    """How to make a run: under which trials, with operations in which window of prints, and for how many batches.

    `fill` is put into memory that is left unwritten. It takes a window.
    """

    trials: tuple[str, ...] = ()
    window: tuple[int, int] | None = None
    most_batches: int | None = None
    fill: int | None = None


Run = Callable[[Request], Recording]
_NO_OPERATION = (
    "no operation differed while operations were recorded, which slows a run down and makes compiled modules run"
    " eagerly: look at threads, streams and compiled code"
)


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
    returns are compared by `nanwatch.fingerprint`. Where the runs part, two further runs record the operations of that
    batch and name the first that differs, its module and line. Then changes are tried that take one source of chance
    away each (a deterministic kernel, one thread, no clock, ...), until the runs are equal.

    Afterwards state, random states and the objects that `step` refers to are as before the call. Takes 2 runs of the
    step when it is repeatable, some 6 to 20 when it is not. Raises what `step` raises.

    >>> import nanwatch, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
    >>> print(nanwatch.twice(lambda: model(torch.ones(2, 4)).sum()).to_text())
    Repeatable: 2 runs of the step are bit-equal over 1 batch (9 tensors each).
    """
    if not callable(step):
        raise TypeError(
            f"step should be a function that runs what is to be compared, got {type(step).__name__}"
        )
    if times < 2:
        raise ValueError(f"times should be at least 2, the number of runs that are compared, got {times}")
    given = None if batches is None else list(batches)
    reach = Reach(step)
    if given is not None:
        reach.rest["batches"] = given
        reach.rest |= {f"batches[{i}]": one for i, one in enumerate(given) if hasattr(one, "untyped_storage")}
    _check_unwatched(reach.state)
    runner = _Runner(step, given, State(reach.state if state is None else state), reach)
    with runner.state.kept(), ExitStack() as after:
        after.callback(runner.leftovers.restore)
        return examine(runner.run, "the step", times, runner.trials)


def _check_unwatched(state: Iterable[object]) -> None:
    for root in state:
        for name, module in each_module(root) if isinstance(root, nn.Module) else ():
            if wrappers(module):
                raise ValueError(
                    f"{module_name(name)} is watched, so its calls cannot be followed; stop the watch before"
                )


class _Runner:
    """Runs of a step in this process."""

    def __init__(
        self, step: Callable[..., Any], batches: list[Any] | None, state: State, reach: Reach
    ) -> None:
        self._step = step
        self._batches = batches
        self.state = state
        self.leftovers = Leftovers(reach)
        self.trials = {
            "kept": Trial(
                "kept",
                "objects that the step keeps put back before each run, and functools caches emptied",
                "something that the step keeps from run to run",
            ),
            **{name: one for name, one in TRIALS.items() if not one.for_scripts},
        }

    def run(self, request: Request) -> Recording:
        self.state.restore()
        if "kept" in request.trials:
            self.leftovers.restore()
            self.leftovers.clear_caches()
        recorder = Recorder(
            request.window,
            fill=request.fill,
            own_storages=frozenset(self.state.storages()),
            roots=self.state.modules,
        )
        notes = recorder.recording.notes
        with ExitStack() as trials:
            for name in request.trials:
                trials.enter_context(self.trials[name].patch(notes.append))
            with recorder.running() as recording:
                self._run_batches(recorder, request.most_batches)
        if "kept" in request.trials:
            notes += self.leftovers.changed()
        return recording

    def _run_batches(self, recorder: Recorder, most: int | None) -> None:
        calls = [()] if self._batches is None else [(one,) for one in self._batches[:most]]
        for number, arguments in enumerate(calls):
            recorder.batch = number
            recorder.add(self._step(*arguments), "result", "result")
        recorder.recording.batches = len(calls)


def examine(run: Run, what: str, times: int, trials: dict[str, Trial], tell: Tell = silent) -> Repetition:
    """Compare `times` runs; where they part, find the operation and try the trials."""
    tell("making the first run")
    first = run(Request())
    found = None
    for number in range(1, times):
        tell(f"making run {number + 1}")
        other = run(Request())
        found = first_difference(first, other)
        if found is not None:
            break
    remarks = _remarks(first)
    if found is None:
        return Repetition(what, times, first.batches, len(first.prints), remarks=remarks)
    difference = FirstDifference.of(*found)
    tell("recording the operations")
    start = next((i for i, one in enumerate(first.prints) if one.batch == difference.batch), 0)
    until = difference.batch + 1
    operation, writes = _operation(run, trials, Request(window=(start, found[0]), most_batches=until))
    cause, ahead = _NO_OPERATION, list[str]()
    if operation is not None:
        cause, ahead = explain(operation)
        writer = writes.get(operation.operand.storage)
        if writer is not None:
            cause = f"what it was given was written in place by {writer}, and is not put back between runs"
            ahead = ["kept", *ahead]
    names = [name for name in dict.fromkeys((*ahead, *trials)) if name in trials]
    tried, shown = _Trials(run, trials, until, tell).make(names, difference.equal_before)
    if shown:
        cause = f"{cause}. {shown}" if cause and operation is not None else shown
    return Repetition(
        what,
        times,
        first.batches,
        len(first.prints),
        replace(difference, **operation_fields(operation, cause)),
        tuple(tried),
        tuple(dict.fromkeys((*remarks, *other.notes))),
    )


def _operation(
    run: Run, trials: dict[str, Trial], request: Request
) -> tuple[OperationDifference | None, dict[int, str]]:
    """Return the operation with which the difference begins, and where runs have written to memory from outside."""
    # The objects that a step keeps may differ between the first run and all others only. Unwritten memory often holds
    # the same.
    ways = [(request, request), (replace(request, fill=1), replace(request, fill=2))]
    if "kept" in trials:
        ways.insert(1, (replace(request, trials=("kept",)), request))
    for one, other in ways:
        a, b = run(one), run(other)
        if first_difference(a, b) is not None:
            return first_operation(a.operations, b.operations, a.target), {**b.writes, **a.writes}
    return None, {}


class _Trials:
    """Runs under trials, until one makes them equal."""

    def __init__(self, run: Run, trials: dict[str, Trial], until: int, tell: Tell) -> None:
        self._run = run
        self._trials = trials
        self._until = until
        self._tell = tell

    def make(self, names: list[str], place: int) -> tuple[list[Tried], str]:
        """Return what was tried, and the cause that it shows, in words. `place` is that of the first difference.

        A trial after which the runs part later has cured one cause of several, so it stays for the trials behind it.
        """
        done: list[Tried] = []
        kept: tuple[str, ...] = ()
        left = list(names)
        while left:
            name = left.pop(0)
            one, farther, notes = self._make((*kept, name))
            done.append(one)
            if one.outcome == "equal":
                return done, _shown([self._trials[name] for name in (*kept, name)], notes)
            if farther > place:
                place, kept = farther, (*kept, name)
                left = [one for one in names if one not in kept]
        return done, ""

    def _make(self, names: tuple[str, ...]) -> tuple[Tried, int, list[str]]:
        """Return the outcome of the runs under these trials, the place where they part, and what was noted."""
        change = " and ".join(self._trials[name].change for name in names)
        self._tell(f"trying {change}")
        request = Request(names, most_batches=self._until)
        try:
            first = self._run(request)
            for _ in range(1 + _CONFIRMING):
                other = self._run(request)
                found = first_difference(first, other)
                if found is not None:
                    return Tried(change, "differ", FirstDifference.of(*found).where), found[0], []
        except Exception as error:  # torch names operations that have no deterministic kernel in this way
            return Tried(change, "failed", spell(error)), -1, []
        return Tried(change, "equal"), len(first.prints), first.notes


def _shown(trials: Iterable[Trial], notes: list[str]) -> str:
    causes = " and ".join(one.cause for one in trials)
    calls = list(dict.fromkeys(notes))
    return f"A trial shows {causes}" + (f": {', '.join(calls[:3])}" if calls else "")


def _remarks(one: Recording) -> tuple[str, ...]:
    unread = one.unread
    found = []
    if unread:
        found.append(
            f"{len(unread):,} tensors could not be compared, the first {unread[0].label}: {unread[0].form}"
        )
    if one.error:
        found.append(f"the run ended by {one.error}")
    return tuple(found)
