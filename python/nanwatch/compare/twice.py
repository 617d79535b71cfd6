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
from ..util.place import Place
from ..util.progress import Tell, silent
from ..util.visible import module_name, spell
from .operations import OperationDifference, first_operation
from .recording import Recorder, Recording, first_difference
from .results import FirstDifference, Repetition, Tried
from .snapshot import KeptAttributes, Snapshot, stateful
from .trials import KEPT, TRIALS, Trial, explain

# Runs beside the first two that have to be equal too before a change is said to make the runs equal.
_CONFIRMING = 2
_MOST_TRIALS = 5


@dataclass(frozen=True, slots=True)
class Request:
    """How to make a run: under which trials, with operations in which window of tensors, and for how many batches."""

    trials: tuple[str, ...] = ()
    window: tuple[int, int] | None = None
    most_batches: int | None = None


Run = Callable[[Request], Recording]
_NO_OPERATION = (
    "no operation differed while operations were recorded, which slows a run down and makes compiled modules run"
    " eagerly: look at threads, streams, unwritten memory and compiled code"
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
    batch and name the first that differs, its module and line. Then changes are tried, at most five, that take one
    source of chance away each (seeds, a clock, threads, ...), until the runs are equal.

    Afterwards state, random states and the attributes of modules are as before the call. Other objects of the program
    that `step` changes are as the runs leave them. Takes 2 runs of the step when it is repeatable, some 8 to 24 when it
    is not. Raises what `step` raises.

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
    arguments = None if batches is None else list(batches)
    objects = stateful(step) if state is None else state
    for root in objects:
        for name, module in each_module(root) if isinstance(root, nn.Module) else ():
            if wrappers(module):
                watched = f"{module_name(name)} is watched"
                raise ValueError(f"{watched}, so its calls cannot be followed; stop the watch before")
    runner = _Runner(step, arguments, Snapshot(objects))
    with runner.snapshot.kept(), ExitStack() as after:
        after.callback(runner.attributes.restore)
        return examine(runner.run, "the step", times, runner.trials)


class _Runner:
    """Runs of a step in this process."""

    def __init__(self, step: Callable[..., Any], batches: list[Any] | None, snapshot: Snapshot) -> None:
        self._step = step
        self._batches = batches
        self.snapshot = snapshot
        self.attributes = KeptAttributes(snapshot.modules)
        self.trials = {
            "kept": KEPT,
            **{name: trial for name, trial in TRIALS.items() if not trial.for_scripts},
        }

    def run(self, request: Request) -> Recording:
        """Run the step from the state that was kept, and return its recording."""
        self.snapshot.restore()
        if "kept" in request.trials:
            self.attributes.restore()
        recorder = Recorder(request.window, roots=self.snapshot.modules)
        notes = recorder.recording.notes
        calls = [()] if self._batches is None else [(batch,) for batch in self._batches]
        with ExitStack() as trials:
            for name in request.trials:
                trials.enter_context(self.trials[name].patch(notes.append))
            with recorder.running() as recording:
                for recorder.batch, arguments in enumerate(calls[: request.most_batches]):
                    recorder.add(self._step(*arguments), "result", "result")
        recording.batches = len(calls[: request.most_batches])
        if "kept" in request.trials:
            notes += self.attributes.changed()
        return recording


def examine(run: Run, what: str, times: int, trials: dict[str, Trial], tell: Tell = silent) -> Repetition:
    """Compare `times` runs; where they part, find the operation and try the trials."""
    first, last, difference = _compared(run, Request(), times, lambda i: tell(f"making run {i}"))
    remarks = [f"the run ended by {first.error}"] if first.error else []
    if unread := [tensor for tensor in first.tensors if "not compared" in tensor.form]:
        label, form = unread[0].label, unread[0].form
        remarks.insert(0, f"{len(unread):,} tensors could not be compared, the first {label}: {form}")
    result = Repetition(what, times, first.batches, len(first.tensors), remarks=tuple(remarks))
    if difference is None:
        return result
    tell("recording the operations")
    place = difference.equal_before
    start = next((i for i, tensor in enumerate(first.tensors) if tensor.batch == difference.batch), 0)
    request = Request(window=(start, place), most_batches=difference.batch + 1)
    operation = _operation(run, trials, request, place)
    cause, ahead = (_NO_OPERATION, list[str]()) if operation is None else explain(operation)
    names = [name for name in dict.fromkeys((*ahead, *trials)) if name in trials]
    tried, shown = _try(run, trials, names, difference, tell)
    if shown:
        cause = f"{cause}. {shown}" if operation is not None else shown
    difference = replace(difference, cause=cause)
    if operation is not None:
        begun = operation.a
        difference = replace(
            difference,
            operation=begun.name,
            operation_module=begun.module or begun.class_name,
            place=Place(begun.file, begun.line) if begun.file else None,
            code=linecache.getline(begun.file, begun.line).strip(),
            in_backward=begun.in_backward,
        )
    notes = tuple(dict.fromkeys((*remarks, *last.notes)))
    return replace(result, difference=difference, tried=tuple(tried), remarks=notes)


def _compared(
    run: Run, request: Request, times: int, tell: Callable[[int], object] = lambda i: None
) -> tuple[Recording, Recording, FirstDifference | None]:
    """Make runs until one differs from the first. Return the first, the last, and the difference."""
    tell(1)
    first = last = run(request)
    for number in range(2, times + 1):
        tell(number)
        last = run(request)
        if (difference := first_difference(first, last)) is not None:
            return first, last, difference
    return first, last, None


def _operation(
    run: Run, trials: dict[str, Trial], request: Request, place: int
) -> OperationDifference | None:
    """Return the operation with which the difference of the tensor at `place` begins."""
    # The objects that a step keeps may differ between the first run and all others only.
    firsts = [request, *([replace(request, trials=("kept",))] if "kept" in trials else [])]
    for request_a in firsts:
        a, b = run(request_a), run(request)
        if first_difference(a, b) is not None:
            target = a.tensors[place].bits if place < len(a.tensors) else 0
            return first_operation(a.operations, b.operations, target)
    return None


def _try(
    run: Run, trials: dict[str, Trial], names: list[str], difference: FirstDifference, tell: Tell
) -> tuple[list[Tried], str]:
    """Make runs under trials until one makes them equal. Return what was tried, and the cause that it shows.

    A trial after which the runs part later has cured one cause of several, so it stays for the trials behind it.
    """
    place = difference.equal_before
    done: list[Tried] = []
    kept: tuple[str, ...] = ()
    left = list(names)
    while left and len(done) < _MOST_TRIALS:
        using = (*kept, left.pop(0))
        change = " and ".join(trials[name].change for name in using)
        tell(f"trying {change}")
        request = Request(using, most_batches=difference.batch + 1)
        try:
            first, _, remaining = _compared(run, request, 2 + _CONFIRMING)
        except Exception as error:  # torch names operations that have no deterministic kernel in this way
            done.append(Tried(change, "failed", spell(error)))
            continue
        if remaining is None:
            done.append(Tried(change, "equal"))
            causes = "; ".join(trials[name].cause for name in using)
            calls = ", ".join(list(dict.fromkeys(first.notes))[:3])
            many = f"{len(using)} causes: " if len(using) > 1 else ""
            end = (f" ({calls})" if many else f": {calls}") if calls else ""
            return done, f"A trial shows {many}{causes}{end}"
        done.append(Tried(change, "differ", remaining.where))
        if remaining.equal_before > place:
            place, kept = remaining.equal_before, using
            left = [name for name in names if name not in kept]
    return done, ""
