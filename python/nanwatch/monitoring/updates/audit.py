"""The audit of an optimizer's steps: which steps are audited, and what becomes of a fault.

Audited are the steps 1, 2 and 3 and every n-th, and further ones while a suspicion is neither certain nor gone. Between
them a step costs a look at a counter.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.compiler import is_compiling
from torch.optim.optimizer import Optimizer

from ...instrumentation.global_hooks import Handles, after_steps, before_steps
from ...instrumentation.step_closure import with_check_after_closure
from ...instrumentation.wrapped_names import named_modules
from ...recording.events import Event, Recorder, WatchPart
from ...recording.step_weight import StepComparison
from ...records.record import Frame
from ...report.update_finding import UpdateFinding, update_finding
from ...util.place import Place
from ...util.visible import spell, suppressed, warn_user
from . import blame, taps
from .copies import Masters, equal_ends, equal_twins, idle_twins, parted, ties
from .culprits import line_of
from .epochs import Epochs
from .evaluations import Evaluations
from .lives import Life, Lives
from .modes import modes
from .never_moved import never_moved
from .not_meant import not_meant
from .rank_steps import RankSteps
from .rules import expect
from .samples import Key, StepSamples, each_weight, sample_after, sample_step
from .suspicions import Fault, Suspicions, gathered
from .view import Clip, StepView, Suspect
from .window import Window, held_by_others, is_taken_scaled, scale_of
from .wrong import wrong

_T = TypeVar("_T")
_FIRST = 3
# Steps in a row that a suspicion may ask for.
_MORE = 10
_MOST_FINDINGS = 64
# Backwards without a step, each after the gradients of the one before were thrown away; and at the end of a run.
_UNSTEPPED, _UNSTEPPED_AT_END = 8, 5


def _harmless(method: Callable[..., _T]) -> Callable[..., _T | None]:
    """Let an exception of the method end the audit, by one warning, and not the user's run."""

    @functools.wraps(method)
    def safe(self: UpdateAudit, *args: Any) -> _T | None:
        if self.is_over:
            return None
        try:
            return method(self, *args)
        except Exception as error:
            suppressed("a step could not be audited")
            self._drop()
            warn_user(f"nanwatch audits no more steps, as one raised {spell(error)}", may_raise=False)
            return None

    return safe


def _past_dynamo(method: Callable[..., _T]) -> Callable[..., _T]:
    """Keep torch.compile from compiling what a compiled step's hook calls. Without it in use, it is not imported."""
    disabled: Callable[..., _T] = _disable_dynamo(method)

    @functools.wraps(method)
    def call(*args: Any) -> _T:
        return (disabled if "torch._dynamo" in sys.modules else method)(*args)

    return call


class _Track:
    """What is known of one optimizer."""

    def __init__(self) -> None:
        self.step = 0
        self.in_a_row = 0  # audits
        self.is_own = False
        self.is_compiled = False
        self.is_repeated = False
        self.suspicions = Suspicions()
        self.previous: StepSamples | None = None
        self.open: StepSamples | None = None
        self.clips: list[Clip] = []
        self.calls_before = 0  # of all calls, those before this window
        self.masters = Masters()
        self.differing: dict[Key, float] = {}
        self.life: Life | None = None


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
        self._model = weakref.ref(model)
        self._recorder = recorder
        self._every = every
        self._tell = tell
        self._is_frozen = is_frozen
        self._ranks = None if ranks is None else RankSteps(ranks)
        self._tracks: weakref.WeakKeyDictionary[Optimizer, _Track] = weakref.WeakKeyDictionary()
        self._modes: dict[str, bool] = {}  # modules that have been in training mode at an audit
        self._ends: list[tuple[str, str]] | None = None
        self._twins: list[tuple[str, str]] = []
        self._lives = Lives()
        self._evaluations = Evaluations(recorder)
        self._told: set[tuple[str, str, str | None]] = set()
        self._window = Window(recorder)
        self._epochs = Epochs()
        taps.epochs.add(self)
        self._starts = recorder.subscribe(Event.BATCH_START)
        this = weakref.ref(self)

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if (own := this()) is None or own.is_over:
                return None
            return (own._before_compiled if is_compiling() else own._before)(optimizer, args, kwargs)

        def after(optimizer: Optimizer, *_: Any) -> None:
            if (own := this()) is not None and not own.is_over:
                (own._after_compiled if is_compiling() else own._after)(optimizer)

        self._hooks = Handles(self, [before_steps.add(before), after_steps.add(after)])

    def remove(self) -> None:
        """Audit no more, and keep the findings. Find backwards that no step followed."""
        if not any(one.is_own for one in self._tracks.values()):
            self._add(self._unstepped(_UNSTEPPED_AT_END, 0))
        if self._ranks is not None:
            self._ranks.remove()
            self._tell_of_ranks()
        self._drop()

    def _drop(self) -> None:
        self.is_over = True
        self._hooks.remove()
        self._starts.remove()
        self._window.remove()
        self._evaluations.frames.remove()
        taps.epochs.remove(self)

    def sum_up(self) -> None:
        """Warn of the findings after the first, in one line."""
        rest = [one.kind for one in self.findings[1:]]
        if rest:
            kinds = ", ".join(dict.fromkeys(rest))
            plural = "" if len(rest) == 1 else "s"
            warn_user(
                f"{len(rest)} more finding{plural} about the optimizer's steps ({kinds}): Watch.updates has them",
                may_raise=False,
            )

    def on_frame(self, frame: Frame) -> None:
        """Take a recorded call."""
        self._window.on_frame(frame)
        if self._evaluations.frames.active:
            self._add(self._drawn(frame))

    @_harmless
    def _drawn(self, frame: Frame) -> UpdateFinding | None:
        model = self._model()
        fault = None if model is None else self._evaluations.drawn(frame, model)
        return None if fault is None else self._finding(self._step, fault, lambda: None)

    def batch_started(self, batch: int, module: nn.Module | None) -> None:
        """Take the start of a batch, in the mode of its call."""
        self._add(self._batch_started(batch, module))

    @_harmless
    def _batch_started(self, batch: int, module: nn.Module | None) -> UpdateFinding | None:
        model = self._model()
        if model is None or self._recorder.paused:
            return None
        if torch.is_grad_enabled():
            self._evaluations.trained()
            if self._window.is_open:
                self._window.batch_started(model, batch)
                return self._unstepped(_UNSTEPPED, _UNSTEPPED - 2)
        elif module is model:
            has_stepped = any(one.is_own for one in self._tracks.values())
            frame = sys._getframe(2)
            for fault, where in self._evaluations.faults(model, batch, frame, has_stepped=has_stepped):
                self._add(self._finding(self._step, fault, where))
        return None

    @_harmless
    def epoch_begins(self, sampler: Any) -> None:
        """Take the beginning of a DistributedSampler's epoch."""
        model = self._model()
        if model is None or not model.training or not torch.is_grad_enabled():
            return
        if (epoch := self._epochs.repeated(sampler, self._step)) is not None:
            fault, frame = Fault("data-order", "", None, 1, {"epoch": epoch}), sys._getframe(1)
            self._add(self._finding(self._step, fault, lambda: blame.place_of(frame)))

    @property
    def _step(self) -> int:
        return max((one.step for one in self._tracks.values() if one.is_own), default=0)

    @_harmless
    def _unstepped(self, least: int, resets: int) -> UpdateFinding | None:
        model, found = self._model(), self._window.unstepped(least, resets)
        if found is None or model is None:
            return None
        optimizer, backward = found
        held = {id(x) for group in optimizer.param_groups for x in group["params"]}
        own = [(module, label, id(x)) for module, label, x in each_weight(model) if x.requires_grad]
        suspects = [Suspect("skipped-step", module, label) for module, label, x in own if x in held]
        fault = next(gathered(suspects, {(module, label): 1 for module, label, _ in own}))
        track = self._tracks.get(optimizer)
        return self._finding(0 if track is None else track.step, fault, lambda: backward.place)

    @_harmless
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        track = self._tracks.get(optimizer)
        if track is None:
            track = self._tracks[optimizer] = _Track()
            track.life = self._lives.begin(optimizer)
        track.open, track.is_repeated = None, False
        self._evaluations.in_a_row = 0
        self._tell_of_ranks()
        if not self._is_due(track, track.step + 1):
            track.step += 1
            return None
        model, found_inf = self._model(), getattr(optimizer, "found_inf", None)
        is_skipped = isinstance(found_inf, Tensor) and bool(found_inf.any())
        if model is None or self._recorder.paused or is_skipped:
            return None
        track.step += 1
        track.is_own = _is_relevant(model, optimizer)
        if not track.is_own:
            return None
        if track.step == 1 and (life := track.life) is not None and life.is_anew:
            fault = Fault("wrong-update:made-anew", "", None, 1, {"times": life.number})
            self._add(self._finding(life.steps_before + 1, fault, lambda: blame.where_made(optimizer)))
        changed = with_check_after_closure(optimizer, args, kwargs, lambda: self._begin(optimizer, track))
        if changed is None:
            self._begin(optimizer, track)
        return changed

    @_disable_dynamo
    def _before_compiled(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = self._before(optimizer, args, kwargs)
        if (track := self._tracks.get(optimizer)) is not None:
            track.is_compiled = True
        return changed

    def _is_due(self, track: _Track, step: int) -> bool:
        return self._is_regular(step) or (track.suspicions.is_open and track.in_a_row < _MORE)

    def _is_regular(self, step: int) -> bool:
        return step <= _FIRST or step % self._every == 0

    @_harmless
    def _tell_of_ranks(self) -> None:
        if self._ranks is not None and (model := self._model()) is not None:
            for step, fault in self._ranks.faults(model):
                self._add(self._finding(step, fault, self._ranks.place))

    @_harmless
    @_past_dynamo
    def _begin(self, optimizer: Optimizer, track: _Track) -> None:
        if (model := self._model()) is None:
            return
        # A step that calls its closure again, as L-BFGS does, is no step of a rule.
        track.is_repeated = track.open is not None
        before = () if track.previous is None else track.previous.weights
        still = frozenset(one.key for one in before if one.has_moved is not True)
        track.open = sample_step(model, optimizer, track.step, still, self._is_frozen)
        track.clips = self._window.clips(optimizer)
        track.differing = track.masters.differing(model, optimizer, track.step)
        # A step without a forward before it is some library's, which fills the optimizer's state on one rank.
        is_comparable = self._is_regular(track.step) and self._recorder.latest_batch >= 0
        if self._ranks is not None and is_comparable and not track.is_repeated:
            self._ranks.check(track.open, self._window, self._evaluations.num_trained)
        if self._ends is None:
            self._ends = equal_ends(model) if track.step == 1 else []
            self._twins = equal_twins(model) if track.step == 1 else []

    @_harmless
    @_past_dynamo
    def _after(self, optimizer: Optimizer) -> None:
        track = self._tracks.get(optimizer)
        if track is None or not track.is_own:
            return
        if track.life is not None:
            track.life.stepped(optimizer)
        found: list[UpdateFinding | None] = []
        samples, model, track.open = track.open, self._model(), None
        if samples is not None and model is not None and not track.is_repeated:
            sample_after(samples)
            expect(samples, optimizer)
            view = self._view(model, optimizer, track, samples)
            suspects = [*never_moved(view), *not_meant(view), *wrong(view), *modes(view, self._modes)]
            suspects += [*ties(view), *parted(samples, self._ends or ()), *idle_twins(view, self._twins)]
            for name, _, module in named_modules(model):
                self._modes[name] = self._modes.get(name, False) or module.training
            trained = {one.key: one.size for one in samples.weights if one.is_trained}
            every = {one.key: one.size for one in samples.weights}
            for fault in track.suspicions.add(suspects, trained, every):
                found.append(self._finding(samples.step, fault, line_of(fault, view)))
            track.in_a_row += 1
        else:
            track.in_a_row, samples = 0, None
        track.previous = samples
        track.calls_before = self._window.num_calls
        if any(one.is_own and self._is_due(one, one.step + 1) for one in self._tracks.values()):
            self._window.renew(optimizer)
        else:
            self._window.close()
        for one in found:
            self._add(one)

    _after_compiled = _disable_dynamo(_after)

    def _view(self, model: nn.Module, optimizer: Optimizer, track: _Track, samples: StepSamples) -> StepView:
        probes = self._window.probes({one.key for one in samples.of_optimizer()})
        scale = scale_of([factor for one in probes for own, _, _ in one.arrivals for factor in own.factors])
        return StepView(
            model,
            optimizer,
            samples,
            self._window.calls_since(track.calls_before),
            probes,
            track.clips,
            others=lambda: held_by_others(optimizer),
            is_first=next(one for one in self._tracks.values() if one.is_own) is track,
            previous=track.previous,
            is_compiled=track.is_compiled,
            scale=scale,
            is_scaled=scale is not None and is_taken_scaled(optimizer),
            casts=frozenset(self._window.casts),
            called=frozenset(self._window.called),
            mastered=track.masters.keys,
            masters=track.differing,
            replaced=track.masters.replaced if samples.step == 2 else frozenset(),
        )

    def _finding(self, step: int, fault: Fault, where: Callable[[], Place | None]) -> UpdateFinding | None:
        key = fault.kind, fault.module, fault.label
        if key in self._told or len(self.findings) >= _MOST_FINDINGS:
            return None
        self._told.add(key)
        place, batch = blame.safely(where), self._recorder.latest_batch
        return update_finding(step, *fault[:3], fault.size, fault.numbers, place, batch)

    def _add(self, found: UpdateFinding | None) -> None:
        if found is not None:
            self.findings.append(found)
            self._tell(found)


def _is_relevant(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether an optimizer has weights of the model, or seems to be meant for it.

    Others of the same shapes may be those of a copy. Where no optimizer has any weight, this one may have old ones.
    """
    held = {id(x): tuple(x.shape) for group in optimizer.param_groups for x in group["params"]}
    own = [x for _, _, x in each_weight(model)]
    if any(id(x) in held for x in own):
        return True
    trained = [x for x in own if x.requires_grad]
    if sorted(held.values()) == sorted(tuple(x.shape) for x in trained):
        return bool(trained)
    others = held_by_others(optimizer)
    return any(x.grad is not None for x in trained) and not any(id(x) in others for x in trained)
