"""The audit of an optimizer's steps: which steps are audited, and what becomes of a fault.

Audits the steps 1, 2, 3 and every n-th, three steps after the gradients, the modes or the rates become what they were
never before, and up to ten in a row while a suspicion is neither certain nor gone.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.compiler import is_compiling
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import Handles, after_steps, before_steps
from ..instrumentation.step_closure import with_check_after_closure
from ..instrumentation.wrapped_names import named_modules
from ..recording.events import Event, Recorder, WatchPart
from ..recording.step_weight import StepComparison, StepWeight
from ..records.record import Frame
from ..report.update_finding import UpdateFinding, update_finding
from ..util.place import Place
from ..util.visible import spell, suppressed, warn_user
from .checks import StepView, depends_on_mode, equal_ends, suspects_of
from .samples import StepSamples, each_weight, sample_after, sample_step
from .suspicions import Fault, Suspect, Suspicions, gathered
from .window import Clip, Window, held_by_others, is_taken_scaled, place_of, scale_of

_T = TypeVar("_T")
# Audits of the first steps, and of those after a state of the training that is new: as many as a suspicion needs.
_FIRST, _AFRESH = 3, 4
# Steps in a row that a suspicion may ask for, and states of a training that are told apart.
_MORE, _MOST_STATES = 10, 32
_MOST_FINDINGS, _MOST_ERRORS = 64, 3
# Calls of the model without grad mode, in training mode: in a row, or rarer than others. One may make the fake samples
# of a GAN, and that for each batch.
_EVALUATIONS, _RARE = 2, 4
_AT_BACKWARD = ("missing-zero-grad", "accumulation", "no-gradient", "zero-gradient", "train-mode-wrong")


def _harmless(method: Callable[..., _T]) -> Callable[..., _T | None]:
    """Let an exception of the method end the audit of a step, and the third the whole audit, but not the user's run.

    torch.compile does not follow what a compiled step's hook calls. Without it in use, it is not imported.
    """
    disabled: Callable[..., _T] = _disable_dynamo(method)

    @functools.wraps(method)
    def safe(self: UpdateAudit, *args: Any) -> _T | None:
        if self.is_over:
            return None
        try:
            return (disabled if "torch._dynamo" in sys.modules else method)(self, *args)
        except Exception as error:
            suppressed("a step could not be audited")
            self._num_errors += 1
            if self._num_errors == _MOST_ERRORS:
                self._drop()
                warn_user(f"nanwatch audits no more steps, as several raised {spell(error)}", may_raise=False)
            return None

    return safe


class _Track:
    """What is known of one optimizer."""

    def __init__(self) -> None:
        self.step = 0
        self.in_a_row = 0  # audits
        self.due_until = _FIRST
        self.states: set[int] = set()
        self.is_relevant = False
        self.suspicions = Suspicions()
        self.previous: StepSamples | None = None
        self.open: StepSamples | None = None
        self.clips: list[Clip] = []
        self.calls_before = 0  # of all calls, those before this window


class UpdateAudit(WatchPart):
    """Part of a Watch with `updates`. `tell` gets each finding. An exception in here ends the audit, not the run.

    `is_frozen` says by the name of a weight or a module whether the user means it to stay as it is. `ranks` compares
    the steps with those of other ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        every: int,
        tell: Callable[[UpdateFinding], object],
        is_frozen: Callable[[str], bool] = lambda _: False,
        ranks: StepComparison | None = None,
    ) -> None:
        self.findings: list[UpdateFinding] = []
        self.is_over = False
        self._num_errors = 0
        self._model = weakref.ref(model)
        self._recorder = recorder
        self._every = every
        self._tell = tell
        self._is_frozen = is_frozen
        self._ranks = ranks
        self._tracks: weakref.WeakKeyDictionary[Optimizer, _Track] = weakref.WeakKeyDictionary()
        self._modules: list[weakref.ref[nn.Module]] = []
        self._modes: dict[str, bool] = {}  # modules that have been in training mode at an audit
        self._ends: list[tuple[str, str]] = []
        self._evaluated: Callable[[], Tensor | None] = lambda: None  # the inputs of the latest evaluation
        self._has_evaluated = self._is_sampled = False
        self._num_trained = self._num_evaluated = 0
        self._trained_in_a_row = self._evaluated_in_a_row = 0
        self._named: set[tuple[str, str, str | None]] = set()
        self._window = Window(recorder)
        self._starts = recorder.subscribe(Event.BATCH_START)
        reference = weakref.ref(self)

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if (audit := reference()) is None or audit.is_over:
                return None
            return (audit._before_compiled if is_compiling() else audit._before)(optimizer, args, kwargs)

        def after(optimizer: Optimizer, *_: Any) -> None:
            if (audit := reference()) is not None and not audit.is_over:
                (audit._after_compiled if is_compiling() else audit._after)(optimizer)

        self._hooks = Handles(self, [before_steps.add(before), after_steps.add(after)])

    def remove(self) -> None:
        """Audit no more, and keep the findings."""
        if self._ranks is not None:
            self._ranks.remove()
            self._tell_of_ranks()
        self._drop()

    def _drop(self) -> None:
        self.is_over = True
        self._hooks.remove()
        self._starts.remove()
        self._window.remove()

    def sum_up(self) -> None:
        """Warn of the findings after the first, in one line."""
        kinds = [finding.kind for finding in self.findings[1:]]
        if kinds:
            warn_user(
                f"{len(kinds)} more finding{'' if len(kinds) == 1 else 's'} about the optimizer's steps"
                f" ({', '.join(dict.fromkeys(kinds))}): Watch.updates has them",
                may_raise=False,
            )

    def on_frame(self, frame: Frame) -> None:
        """Take a recorded call."""
        self._window.on_frame(frame)

    @_harmless
    def batch_started(self, batch: int, module: nn.Module | None, args: tuple[Any, ...]) -> None:
        """Take the start of a batch, in the mode of its call."""
        model = self._model()
        if model is None or self._recorder.paused:
            return
        # A compiled call tells no module, and runs below autograd, so its mode is not known.
        if torch.is_grad_enabled() or module is None:
            self._evaluated_in_a_row = 0
            self._num_trained += 1
            self._trained_in_a_row += 1
            self._window.batch_started(model, batch)
        elif module is model and model.training and self._step:
            before, inputs = self._evaluated(), next((x for x in args if isinstance(x, Tensor)), None)
            # Monte Carlo dropout calls the model with the same tensor again and again, and is no evaluation.
            is_again = self._evaluated_in_a_row > 0 and inputs is not None and inputs is before
            self._evaluated = (lambda: None) if inputs is None else weakref.ref(inputs)
            if is_again:
                return
            self._evaluated_in_a_row += 1
            # A forward without grad mode before that of a training batch, as self-conditioning makes, is not so rare.
            self._is_sampled |= self._has_evaluated and 0 < self._trained_in_a_row < _RARE
            self._num_evaluated += self._trained_in_a_row >= _RARE
            self._has_evaluated, self._trained_in_a_row = True, 0
            is_rare = self._num_evaluated == _EVALUATIONS and not self._is_sampled
            if (is_rare or self._evaluated_in_a_row == _EVALUATIONS) and depends_on_mode(model):
                place = place_of(sys._getframe(1))
                self._add(self._step, Fault("eval-mode-wrong", "", None, 1, {}), place)

    @property
    def _step(self) -> int:
        return max((track.step for track in self._tracks.values() if track.is_relevant), default=0)

    @_harmless
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        track = self._tracks.get(optimizer)
        if track is None:
            track = self._tracks[optimizer] = _Track()
        track.open = None
        self._window.num_steps += 1
        self._evaluated_in_a_row = 0
        self._tell_of_ranks()
        if not self._is_due(track, track.step + 1):
            track.step += 1
            if track.is_relevant and self._is_new_state(optimizer, track):
                track.due_until = track.step + _AFRESH
            return None
        model, found_inf = self._model(), getattr(optimizer, "found_inf", None)
        is_skipped = isinstance(found_inf, Tensor) and bool(found_inf.any())
        if model is None or self._recorder.paused or is_skipped:
            return None
        track.step += 1
        track.is_relevant = _is_relevant(model, optimizer)
        if not track.is_relevant:
            return None
        changed = with_check_after_closure(optimizer, args, kwargs, lambda: self._begin(optimizer, track))
        if changed is None:
            self._begin(optimizer, track)
        return changed

    _before_compiled = _disable_dynamo(_before)

    def _is_due(self, track: _Track, step: int) -> bool:
        is_suspect = track.suspicions.is_open and track.in_a_row < _MORE
        return step <= track.due_until or step % self._every == 0 or is_suspect

    def _is_new_state(self, optimizer: Optimizer, track: _Track) -> bool:
        """Return whether the gradients, the rates of 0 and the modes together are what they were at no step before."""
        state = hash(tuple(_state_of(optimizer, self._modules)))
        is_new = state not in track.states and len(track.states) < _MOST_STATES
        track.states.add(state)
        return is_new

    @_harmless
    def _tell_of_ranks(self) -> None:
        if self._ranks is not None and (model := self._model()) is not None:
            for step, fault in _rank_faults(self._ranks, model):
                self._add(step, fault, None)

    @_harmless
    def _begin(self, optimizer: Optimizer, track: _Track) -> None:
        if (model := self._model()) is None:
            return
        if track.open is not None:
            track.open.is_repeated = True
            return
        self._modules = [weakref.ref(item.module) for item in named_modules(model)]
        self._is_new_state(optimizer, track)
        track.open = sample_step(model, optimizer, track.step, self._is_frozen)
        track.clips = self._window.clips(optimizer)
        # A step without a forward before it is some library's, which fills the optimizer's state on one rank.
        is_regular = track.step <= _FIRST or track.step % self._every == 0
        if self._ranks is not None and is_regular and self._recorder.latest_batch >= 0:
            _check_ranks(self._ranks, track.open, self._window, self._num_trained)
        if track.step == 1:  # also of an optimizer that was made anew, with other weights perhaps
            self._ends = list(dict.fromkeys([*self._ends, *equal_ends(model)]))

    @_harmless
    def _after(self, optimizer: Optimizer) -> None:
        track, model = self._tracks.get(optimizer), self._model()
        if track is None or model is None or not track.is_relevant:
            return
        faults: list[Fault] = []
        samples, track.open = track.open, None
        if samples is None:
            track.in_a_row = 0
        else:
            sample_after(samples)
            view = self._view(model, optimizer, track, samples)
            faults = list(track.suspicions.add(suspects_of(view), samples))
            for name, _, module in named_modules(model):
                self._modes[name] = self._modes.get(name, False) or module.training
            track.in_a_row += 1
            for fault in faults:
                self._add(samples.step, fault, _place(fault.kind, view, sys._getframe(1)))
        track.previous = samples
        track.calls_before = self._window.num_calls
        tracks = [track for track in self._tracks.values() if track.is_relevant]
        if any(self._is_due(track, track.step + 1) for track in tracks):
            asked = {key for track in tracks for key in track.suspicions.keys("no-gradient")}
            self._window.renew(optimizer, model, asked)
        else:
            self._window.close()

    _after_compiled = _disable_dynamo(_after)

    def _view(self, model: nn.Module, optimizer: Optimizer, track: _Track, samples: StepSamples) -> StepView:
        keys = {weight.key for weight in samples.of_optimizer()}
        probes = [probe for probe in self._window.probes if probe.key in keys]
        scale = scale_of(
            [x for probe in probes for arrival in probe.arrivals for x in arrival.backward.factors]
        )
        return StepView(
            model,
            optimizer,
            samples,
            self._window.calls_since(track.calls_before),
            probes,
            track.clips,
            others=lambda: held_by_others(optimizer),
            is_first=next(first for first in self._tracks.values() if first.is_relevant) is track,
            previous=track.previous,
            scale=scale,
            is_scaled=scale is not None and is_taken_scaled(optimizer),
            modes=self._modes,
            ends=self._ends,
        )

    def _add(self, step: int, fault: Fault, place: Place | None) -> None:
        key = fault[:3]
        if key in self._named or len(self.findings) >= _MOST_FINDINGS:
            return
        self._named.add(key)
        where, batch = None if place is None else str(place), self._recorder.latest_batch
        finding = update_finding(step, *key, fault.size, fault.numbers, where, batch)
        self.findings.append(finding)
        self._tell(finding)


def _state_of(optimizer: Optimizer, modules: Sequence[weakref.ref[nn.Module]]) -> Iterator[bool]:
    for group in optimizer.param_groups:
        yield bool(group.get("lr"))
    for reference in modules:
        if (module := reference()) is not None:
            yield module.training
            for x in module._parameters.values():
                if x is not None:
                    yield x.grad is None
                    yield x.requires_grad


def _place(kind: str, view: StepView, frame: FrameType) -> Place | None:
    """Return the line of the clip or the backward that a fault is of, else of the step."""
    if kind.startswith(("clipping", "not-unscaled")) and view.clips:
        return view.clips[-1].place
    arrivals = (arrival for probe in view.probes for arrival in probe.arrivals)
    places = [arrival.backward.place for arrival in arrivals] if kind in _AT_BACKWARD else []
    return next(filter(None, places), None) or place_of(frame)


def _is_relevant(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether an optimizer has weights of the model, or seems to be meant for it.

    Others of the same shapes may be those of a copy. Where no optimizer has any weight, this one may have old ones.
    """
    shapes = {id(x): tuple(x.shape) for group in optimizer.param_groups for x in group["params"]}
    weights = [x for _, _, x in each_weight(model)]
    if any(id(x) in shapes for x in weights):
        return True
    trained = [x for x in weights if x.requires_grad]
    if sorted(shapes.values()) == sorted(tuple(x.shape) for x in trained):
        return bool(trained)
    others = held_by_others(optimizer)
    return any(x.grad is not None for x in trained) and not any(id(x) in others for x in trained)


def _check_ranks(comparison: StepComparison, samples: StepSamples, window: Window, num_forwards: int) -> None:
    """Hand a step to the comparison."""
    sizes = window.group_sizes()
    weights = []
    for weight in samples.of_optimizer():
        x = weight.tensor()
        if x is not None and weight.before is not None and weight.is_trained:
            size = None if x.grad is None else sizes.get(id(x.grad))
            name = ".".join(filter(None, weight.key))
            weights.append(StepWeight(name, x, weight.before, weight.gradient, size))
    comparison.check(samples.step, num_forwards, weights)


def _rank_faults(comparison: StepComparison, model: nn.Module) -> Iterator[tuple[int, Fault]]:
    """Yield the faults that became certain since the last call, each with its step."""
    faults = comparison.faults()
    if not faults:
        return
    suspects = []
    for fault in faults:
        module, _, label = fault.name.rpartition(".")
        suspects.append(Suspect(fault.kind, module, label, {"rank": fault.rank}))
    trained = {(name, label): x.numel() for name, label, x in each_weight(model) if x.requires_grad}
    for gathered_fault in gathered(suspects, trained):
        yield min(fault.step for fault in faults), gathered_fault
