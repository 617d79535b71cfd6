"""The audit of an optimizer's steps: which steps are audited, and what becomes of a fault.

Audits the steps 1, 2, 3 and every n-th, the four steps after a combination of gradients, modes and rates that is new,
and up to ten in a row while a suspicion is neither certain nor gone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import (
    Handles,
    after_steps,
    before_steps,
    weakly,
    with_check_after_closure,
)
from ..recording.events import Event, Recorder, StepWeight
from ..records.record import Frame
from ..report.events import UpdateFinding, update_finding
from ..report.finding import Place
from ..util.messages import spell, suppressed, warn_user
from ..util.program import each_module, each_parameter, is_in
from .rules import Evaluations, Suspect, ancestors, copies_among, suspects_of
from .window import IsFrozen, Step, Weights, Window, each_weight, is_relevant, number, user_line

Tell: TypeAlias = Callable[[UpdateFinding], object]
# Audits of the first steps, and of those after a state of the training that is new: as many as a suspicion needs.
_FIRST, _AFRESH = 3, 4
# Steps in a row that a suspicion may ask for, and states of a training that are told apart.
_MORE, _MOST_STATES = 10, 32
_MOST_FINDINGS, _MOST_ERRORS = 64, 3
_AT_BACKWARD = ("missing-zero-grad", "accumulation", "no-gradient", "zero-gradient", "train-mode-wrong")

# Audits in a row in which a weight must be suspected. A head that the loss leaves out, an expert without tokens, a
# branch behind a gain of 0, and layers at a rate of 0 that are released later are no fault, and are over in fewer.
_NEEDED = {
    **dict.fromkeys(("no-gradient", "zero-gradient", "other-module-trained:copy"), 6),
    "not-stepped": 8,
    **dict.fromkeys(("absorbed", "absorbed:state", "not-in-optimizer", "other-module-trained"), 3),
    "train-mode-wrong": 3,
}
_NEEDED_ELSE = 2
# Share of a module's elements that need not have a fault of the module: its biases take any update.
_MISSING = {"absorbed": 0.25, "absorbed:state": 0.25, "zero-gradient": 0.25}


def _harmless(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let an exception of the method end the audit of a step, and the third the whole audit, but not the user's run."""

    @functools.wraps(method)
    def safe(self: UpdateAudit, *args: Any) -> Any:
        try:
            return None if self.is_over else method(self, *args)
        except Exception as error:
            suppressed("a step could not be audited")
            self._num_errors += 1
            if self._num_errors == _MOST_ERRORS:
                self._drop()
                warn_user(f"nanwatch audits no more steps, as several raised {spell(error)}", may_raise=False)
            return None

    return safe


def gathered(
    ripe: Sequence[Suspect], weights: Mapping[tuple[str, str], int]
) -> Iterator[tuple[Suspect, int]]:
    """Yield one fault for each largest module whose weights have it: all of these, or nearly all of their elements.

    `weights` are the trained ones with their sizes. The number is that of the weights that are meant.
    """
    hits = {(suspect.module, suspect.label) for suspect in ripe}
    named: set[tuple[str, str | None]] = set()
    for suspect in ripe:
        module, label, count = suspect.module, suspect.label, 1
        for above in ancestors(module) if label is not None else ():
            inside = {key: size for key, size in weights.items() if is_in(key[0], above)}
            missing = sum(size for key, size in inside.items() if key not in hits)
            # A module of one weight is named with it.
            if len(inside) > 1 and missing <= _MISSING.get(suspect.kind, 0.0) * sum(inside.values()):
                module, label, count = above, None, len(inside.keys() & hits)
        if (module, label) not in named:
            named.add((module, label))
            yield Suspect(suspect.kind, module, label, suspect.numbers), count


class _Track:
    """Audits of one optimizer, and how often in a row each weight was suspected of each fault."""

    def __init__(self) -> None:
        self.step = 0
        self.in_a_row = 0  # audits
        self.due_until = _FIRST
        self.states: set[int] = set()
        self.is_relevant = self.has_learned = False
        self.previous: Weights = {}  # in the step before, if it was audited
        self.open: Step | None = None
        self.time = 0  # of the window, when the step before was over
        self._suspected: dict[tuple[str, str, str | None], int] = {}
        self._certain: set[tuple[str, str, str | None]] = set()

    def is_due(self, step: int, every: int) -> bool:
        """Return whether to audit this step. A suspicion that is neither certain nor gone asks for an audit."""
        is_open = any(key not in self._certain for key in self._suspected) and self.in_a_row < _MORE
        return step <= self.due_until or step % every == 0 or is_open

    def is_new(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Return whether the gradients, the rates of 0 and the modes together are what they were at no step before."""
        rates = tuple(bool(group.get("lr")) for group in optimizer.param_groups)
        modes = tuple(module.training for _, module in each_module(model))
        gradients = tuple((x.grad is None, x.requires_grad) for x in each_parameter(model))
        state = hash((rates, modes, gradients))
        is_new = state not in self.states and len(self.states) < _MOST_STATES
        self.states.add(state)
        return is_new

    def add(self, step: Step) -> Iterator[tuple[Suspect, int]]:
        """Take an audit, and yield the faults that are certain by now, each once: see `gathered`."""
        new = {suspect[:3]: suspect for suspect in suspects_of(step)}
        self._suspected = {key: self._suspected.get(key, 0) + 1 for key in new}
        often = {key for key, count in self._suspected.items() if count >= _NEEDED.get(key[0], _NEEDED_ELSE)}
        ripe = [new[key] for key in new if key in often - self._certain]
        self._certain |= often
        sizes = {weight.key: weight.shape.numel() for weight in step.weights.values()}
        trained = {weight.key: sizes[weight.key] for weight in step.weights.values() if weight.is_trained}
        for kind in dict.fromkeys(suspect.kind for suspect in ripe):
            alike = [suspect for suspect in ripe if suspect.kind == kind]
            are_trained = all((suspect.module, suspect.label) in trained for suspect in alike)
            yield from gathered(alike, trained if are_trained else sizes)


class UpdateAudit:
    """Part of a Watch with `audit`. `tell` gets each finding. An exception in here ends the audit, not the run.

    `is_frozen` says by the name of a weight or a module whether the user means it to stay as it is. `ranks` compares
    the steps with those of other ranks.
    """

    def __init__(
        self, model: nn.Module, recorder: Recorder, every: int, tell: Tell, is_frozen: IsFrozen, ranks: Any
    ) -> None:
        self.findings: list[UpdateFinding] = []
        self.is_over = False
        self._num_errors = self._num_forwards = 0
        self._model = weakref.ref(model)
        self._recorder, self._every, self._tell = recorder, every, tell
        self._is_frozen, self._ranks = is_frozen, ranks
        self._tracks: weakref.WeakKeyDictionary[Optimizer, _Track] = weakref.WeakKeyDictionary()
        self._evaluations = Evaluations()
        self._named: set[tuple[str, str, str | None]] = set()
        self._window = Window(recorder, model, weakly(self._skipped))
        self.on_frame: Callable[[Frame], None] = self._window.on_frame
        self._starts = recorder.subscribe(Event.BATCH_START)
        hooks = before_steps.add(weakly(self._before)), after_steps.add(weakly(self._after))
        self._hooks = Handles(self, hooks)

    def remove(self) -> None:
        """Audit no more, and keep the findings."""
        self._tell_of_calls(None)
        self._ranks.remove()
        self._tell_of_ranks()
        self._drop()

    def _drop(self) -> None:
        self.is_over = True
        self._hooks.remove()
        self._starts.remove()
        self._window.close()
        self._window.taps.remove()

    @_harmless
    def batch_started(self, batch: int, module: nn.Module | None, args: tuple[Any, ...]) -> None:
        """Take the start of a batch, in the mode of its call."""
        model = self._model()
        if model is None or self._recorder.paused:
            return
        inputs = next((x for x in args if isinstance(x, Tensor)), None)
        # A compiled call tells no module, and runs below autograd, so its mode is not known.
        if torch.is_grad_enabled() or module is None:
            self._num_forwards += 1
            self._window.batches.append(batch)
            self._tell_of_calls(inputs)
        elif module is model and model.training and self._step:
            self._evaluations.called(model, inputs)

    @_harmless
    def _tell_of_calls(self, inputs: Tensor | None) -> None:
        """Tell of an evaluation that has ended."""
        for place in self._evaluations.trained(inputs):
            self._add(self._step, Suspect("eval-mode-wrong", "", None), 1, place)

    @property
    def _step(self) -> int:
        return max((track.step for track in self._tracks.values() if track.is_relevant), default=0)

    @_harmless
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        track = self._tracks.setdefault(optimizer, _Track())
        track.open = None
        self._window.time += 1
        self._evaluations.progress += 1
        self._tell_of_ranks()
        if (model := self._model()) is None:
            return None
        if not track.is_due(track.step + 1, self._every):
            track.step += 1
            if track.is_relevant and track.is_new(model, optimizer):
                track.due_until = track.step + _AFRESH
            return None
        if self._recorder.paused or number(getattr(optimizer, "found_inf", None)):  # the step is skipped
            return None
        track.step += 1
        track.is_relevant = is_relevant(model, optimizer)
        begin = functools.partial(self._begin, optimizer, track)
        changed = with_check_after_closure(optimizer, args, kwargs, begin) if track.is_relevant else None
        if changed is None and track.is_relevant:
            begin()
        return changed

    @_harmless
    def _tell_of_ranks(self) -> None:
        if not (faults := self._ranks.faults()) or (model := self._model()) is None:
            return
        split = [(kind, name.rpartition("."), rank) for kind, name, _, rank in faults]
        suspects = [Suspect(kind, module, label, {"rank": rank}) for kind, (module, _, label), rank in split]
        trained = {(name, label): x.numel() for name, label, x in each_weight(model) if x.requires_grad}
        for suspect, count in gathered(suspects, trained):
            self._add(min(step for _, _, step, _ in faults), suspect, count, None)

    @_harmless
    def _begin(self, optimizer: Optimizer, track: _Track) -> None:
        if (model := self._model()) is None or track.open is not None:  # L-BFGS calls its closure again
            return
        track.is_new(model, optimizer)
        before = track.previous, track.time, track.has_learned
        track.open = Step(model, optimizer, self._window, self._is_frozen, *before)
        if track.step == 1:  # also of an optimizer that was made anew, with other weights perhaps
            self._window.copies |= dict.fromkeys(copies_among(track.open.weights.values()))
        # A step without a forward before it is some library's, which fills the optimizer's state on one rank.
        is_regular = track.step <= _FIRST or track.step % self._every == 0
        if is_regular and self._recorder.latest_batch >= 0:
            self._ranks.check(track.step, self._num_forwards, list(_compared(track.open)))

    @_harmless
    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        track, model = self._tracks.get(optimizer), self._model()
        if track is None or model is None or not track.is_relevant:
            return
        step, track.open = track.open, None
        track.in_a_row, track.previous = (0, {}) if step is None else (track.in_a_row + 1, step.weights)
        if step is not None:
            step.finish()
            for suspect, count in track.add(step):
                self._add(track.step or 1, suspect, count, _place(suspect.kind, step) or user_line())
            self._window.has_trained |= model.training
            track.has_learned |= any(weight.grad == "some" for weight in step.trained)
        self._window.time += 1
        track.time = self._window.time
        relevant = [each for each in self._tracks.values() if each.is_relevant]
        if any(each.is_due(each.step + 1, self._every) for each in relevant):
            self._window.renew(optimizer)
        else:
            self._window.close()

    @_harmless
    def _skipped(self, optimizer: Optimizer, scale: float) -> None:
        """Audit a step that a GradScaler has skipped with this scale."""
        if (model := self._model()) is not None and is_relevant(model, optimizer):
            track = self._tracks.setdefault(optimizer, _Track())
            track.is_relevant = True
            track.open = Step(model, optimizer, self._window, self._is_frozen, {}, 0, False, scale)
            self._after(optimizer)

    def _add(self, step: int, suspect: Suspect, count: int, place: Place | None) -> None:
        key = suspect[:3]
        if key in self._named or len(self.findings) >= _MOST_FINDINGS:
            return
        self._named.add(key)
        where = None if place is None else str(place)
        finding = update_finding(step, *key, count, suspect.numbers, where, self._recorder.latest_batch)
        self.findings.append(finding)
        self._tell(finding)


def _place(kind: str, step: Step) -> Place | None:
    """Return the line of the clip or the backward that a fault is of, None where it is of the step."""
    if kind.startswith(("clipping", "not-unscaled")) and step.clips:
        return step.clips[-1].place
    places = (arrival.place for weight in step.in_optimizer for arrival in weight.arrivals)
    return next(filter(None, places), None) if kind in _AT_BACKWARD else None


def _compared(step: Step) -> Iterator[StepWeight]:
    """Yield the weights of a step in the form in which ranks compare them."""
    for weight in step.trained:
        x = weight.tensor()
        if x is not None and weight.before is not None:
            size = None if x.grad is None else step.window.group_sizes.get(x.grad)
            yield StepWeight(".".join(filter(None, weight.key)), x, weight.before, weight.gradient, size)
