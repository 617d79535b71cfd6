"""`nanwatch.twice`: run a step twice from the same state, compare bit for bit, and try what makes the runs equal."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..instrumentation.slot import wrappers
from ..util.modules import each_module
from ..util.progress import Tell, silent
from ..util.visible import module_name, spell
from .operations import OperationDifference, first_operation
from .recording import Recorder, Recording, first_difference
from .results import FirstDifference, Repetition, Tried
from .state import Leftovers, Reach, State
from .trials import TRIALS, Trial, explain

# Runs beside the first two that have to be equal too before a change is said to make the runs equal.
_CONFIRMING = 2


@dataclass(frozen=True, slots=True)
class Request:
    """How to make a run: under which trials, with operations in which window of tensors, and for how many batches.

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
                calls = [()] if self._batches is None else [(one,) for one in self._batches]
                for recorder.batch, arguments in enumerate(calls[: request.most_batches]):
                    recorder.add(self._step(*arguments), "result", "result")
        recording.batches = len(calls[: request.most_batches])
        if "kept" in request.trials:
            notes += self.leftovers.changed()
        return recording


def examine(run: Run, what: str, times: int, trials: dict[str, Trial], tell: Tell = silent) -> Repetition:
    """Compare `times` runs; where they part, find the operation and try the trials."""
    first, other, difference = _compared(run, Request(), times, lambda i: tell(f"making run {i}"))
    remarks = [f"the run ended by {first.error}"] if first.error else []
    if unread := [one for one in first.tensors if "not compared" in one.form]:
        label, form = unread[0].label, unread[0].form
        remarks.insert(0, f"{len(unread):,} tensors could not be compared, the first {label}: {form}")
    result = Repetition(what, times, first.batches, len(first.tensors), remarks=tuple(remarks))
    if difference is None:
        return result
    tell("recording the operations")
    start = next((i for i, one in enumerate(first.tensors) if one.batch == difference.batch), 0)
    until = difference.batch + 1
    window = (start, difference.equal_before)
    operation, writes = _operation(run, trials, Request(window=window, most_batches=until))
    cause, ahead = _NO_OPERATION, list[str]()
    if operation is not None:
        cause, ahead = explain(operation)
        writer = writes.get(operation.operand.storage)
        if writer is not None:
            cause = f"what it was given was written in place by {writer}, and is not put back between runs"
            ahead = ["kept", *ahead]
    names = [name for name in dict.fromkeys((*ahead, *trials)) if name in trials]
    tried, shown = _try(run, trials, names, until, difference.equal_before, tell)
    if shown:
        cause = f"{cause}. {shown}" if operation is not None else shown
    if operation is not None:
        one = operation.a
        difference = replace(
            difference,
            operation=one.name,
            operation_module=one.module or one.class_name,
            place=one.place,
            code="" if one.place is None else linecache.getline(*one.place[:2]).strip(),
            in_backward=one.in_backward,
        )
    return replace(
        result,
        difference=replace(difference, cause=cause),
        tried=tuple(tried),
        remarks=tuple(dict.fromkeys((*remarks, *other.notes))),
    )


def _compared(
    run: Run, request: Request, times: int, tell: Callable[[int], object] = lambda i: None
) -> tuple[Recording, Recording, FirstDifference | None]:
    """Make runs until one differs from the first. Return the first, the last, and the difference."""
    tell(1)
    first = other = run(request)
    for number in range(2, times + 1):
        tell(number)
        other = run(request)
        if (found := first_difference(first, other)) is not None:
            return first, other, found
    return first, other, None


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


def _try(
    run: Run, trials: dict[str, Trial], names: list[str], until: int, place: int, tell: Tell
) -> tuple[list[Tried], str]:
    """Make runs under trials until one makes them equal. Return what was tried, and the cause that it shows.

    `place` is that of the first difference. A trial after which the runs part later has cured one cause of several, so
    it stays for the trials behind it.
    """
    done: list[Tried] = []
    kept: tuple[str, ...] = ()
    left = list(names)
    while left:
        using = (*kept, left.pop(0))
        change = " and ".join(trials[name].change for name in using)
        tell(f"trying {change}")
        try:
            first, _, found = _compared(run, Request(using, most_batches=until), 2 + _CONFIRMING)
        except Exception as error:  # torch names operations that have no deterministic kernel in this way
            done.append(Tried(change, "failed", spell(error)))
            continue
        if found is None:
            done.append(Tried(change, "equal"))
            causes = "; ".join(trials[name].cause for name in using)
            calls = ", ".join(list(dict.fromkeys(first.notes))[:3])
            many = f"{len(using)} causes: " if len(using) > 1 else ""
            end = (f" ({calls})" if many else f": {calls}") if calls else ""
            return done, f"A trial shows {many}{causes}{end}"
        done.append(Tried(change, "differ", found.where))
        if found.equal_before > place:
            place, kept = found.equal_before, using
            left = [one for one in names if one not in kept]
    return done, ""
