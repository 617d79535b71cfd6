"""Guard between non-finite gradients and the weights: a backward's failure is deferred until a step would take it.

The failure is not raised at once: with a GradScaler an inf in the gradients is none, as the step is skipped and the
scale goes down. PyTorch gives no signal when GradScaler skips a step, so the guard infers it afterwards: the optimizer
says `found_inf` (fused ones), the scale has fallen, or the non-finite gradients are gone.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..diagnosis.incident import Incident
from ..instrumentation.grad_scaler import find_scaler
from ..numerics.readable import only_our_dispatch
from ..recording.events import Recorder
from ..recording.observe import read
from ..records.note import Note
from ..report import text
from ..report.skipped_step import SkippedStep
from ..util.visible import suppressed, warn_user
from .options import Options

# Skipped steps that are kept. All are counted.
_MAX_KEPT = 100

# A weight: its module, and its name in it.
Weight = tuple["weakref.ref[nn.Module]", str]


@dataclass(slots=True)
class _Pending:
    incident: Incident
    batches: set[int]
    weights: set[Weight]
    scale: float | None
    skipped: bool = False  # as the optimizer itself said


class OptimizerGuard:
    """Failure of the latest backward, deferred until an optimizer's step is about to take its gradients.

    `defer` and `check_step` return an incident that is due now. The caller acts on it before the weights change. The
    guard tells `recorder` which gradients are no fault after all. Where the options name no GradScaler, the guard looks
    for one when it first needs it. `tell` gets each skipped step.
    """

    def __init__(
        self, recorder: Recorder, options: Options, tell: Callable[[SkippedStep], object] = lambda _: None
    ) -> None:
        self._tell = tell
        self.skipped: deque[SkippedStep] = deque(maxlen=_MAX_KEPT)
        self.num_skipped = 0
        self.num_untaken = 0  # non-finite backwards after which a step took finite gradients
        self._num_told = 0  # of them, at the latest warning
        self._recorder = recorder
        self._max_skipped_steps = options.max_skipped_steps
        self._scaler: Callable[[], Any] | None = (
            None if options.scaler is None else weakref.ref(options.scaler)
        )
        self._is_known = options.scaler is not None
        self._noted = 0  # scales
        self._pending: _Pending | None = None
        self._in_a_row = 0
        self._latest: set[Weight] = set()  # whose step was skipped last

    @property
    def has_scaler(self) -> bool:
        """True if the GradScaler is known."""
        return self._scaler is not None and self._scaler() is not None

    @property
    def pending(self) -> Incident | None:
        """The incident of the deferred backward."""
        return None if self._pending is None else self._pending.incident

    def release(self) -> Incident | None:
        """Return that incident, and drop it."""
        pending = self.pending
        self._drop()
        return pending

    def note_scale(self) -> Tensor | None:
        """Return a copy of the present scale on its own device, without a wait; None where no scaler is found."""
        self._noted += 1
        if self._scaler is None and self._noted & (self._noted - 1) == 0:
            # Look before anything is non-finite, because later the scale is another; ever less often in vain.
            found = find_scaler()
            self._scaler = None if found() is None else found
        scale = None if self._scaler is None else getattr(self._scaler(), "_scale", None)
        try:
            with only_our_dispatch(), torch.no_grad():
                return scale.detach().clone() if isinstance(scale, Tensor) else None
        except RuntimeError:  # no memory, or a device that has failed
            return None

    def defer(self, incident: Incident, batches: set[int], weights: set[Weight]) -> Incident | None:
        """Defer the failure of a backward: the gradients of these weights, in these batches, are not finite.

        Return the incident if it is due at once: too many steps in a row were skipped, or a step is under way.
        """
        pending = self._pending
        if pending is None:
            self._pending = _Pending(incident, batches, weights, self._scale())
        else:
            # New sets: another thread may iterate over the old ones.
            pending.batches = pending.batches | batches
            pending.weights = pending.weights | weights
        if self._in_a_row >= self._max_skipped_steps:
            count, self._in_a_row = self._in_a_row, 0
            return self._due(
                f"the {count} steps before this one were skipped, as gradients were not finite;"
                f" max_skipped_steps={self._max_skipped_steps} lets no more pass"
            )
        # In a closure: the step has been checked, and changes the weights next.
        return self._due() if is_inside_step() else None

    def settle(self) -> None:
        """Find out whether the step of the deferred backward was skipped meanwhile."""
        pending = self._pending
        if pending is None or not (pending.skipped or self._has_fallen(pending) or _are_clean(pending)):
            return
        after = self._scale()
        if not (self._is_known or pending.skipped or self._has_fallen(pending)):
            pending.scale = None  # the scaler that was found has no part in this
        self._skip(pending, after)

    def _skip(self, pending: _Pending, after: float | None) -> None:
        self._drop()
        finding, before = pending.incident.finding, pending.scale
        step = SkippedStep(finding.batch, before, after, finding)
        self.skipped.append(step)
        self.num_skipped += 1
        self._in_a_row += 1
        self._latest = pending.weights
        self._recorder.excuse_gradients(sorted(pending.batches), step.note)
        self._tell(step)

    def settle_scaled(self) -> None:
        """Settle the deferred failure, if its step is known to be skipped: not where its gradients are only gone."""
        if self._pending is not None and (self._pending.skipped or self._has_fallen(self._pending)):
            self.settle()

    def check_step(self, optimizer: Optimizer, *, is_nonfinite: bool) -> Incident | None:
        """Return the incident that a step of `optimizer` is about to take; None lets it pass.

        is_nonfinite: a gradient of the optimizer's parameters is not finite.
        """
        pending = self._pending
        if pending is None:
            if self._in_a_row and _steps(optimizer, self._latest):
                self._in_a_row = 0
            return None
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor) and bool(found_inf.detach().any()):
            pending.skipped = True
            scale = getattr(optimizer, "grad_scale", None)
            if pending.scale is None and isinstance(scale, Tensor):
                pending.scale = float(scale)
        elif is_nonfinite:
            return self._due()
        elif not pending.weights or _are_clean(pending):
            self._let_pass(pending)
        return None

    def _let_pass(self, pending: _Pending) -> None:
        self._drop()
        self._recorder.excuse_gradients(sorted(pending.batches), Note("not_taken"))
        self.num_untaken = count = self.num_untaken + 1
        if (
            count < 2 * self._num_told
        ):  # warn of the 1st, 2nd, 4th, 8th: 100 bad batches give 7 lines and a sum
            return
        self._num_told = count
        so_far = f" ({count:,} such backwards so far)" if count > 1 else ""
        warn_user(
            f"{text.summary(pending.incident.finding)}; the gradients that the optimizer's step takes are finite:"
            f" nothing was stopped{so_far}"
        )

    def sum_up(self) -> None:
        """Warn of the number of backwards that were let pass, unless a warning has said it."""
        if self.num_untaken == self._num_told:
            return
        self._num_told = self.num_untaken
        # A filter that raises has done so at the first of them.
        warn_user(
            f"{self.num_untaken:,} backwards were not finite, but the gradients that the optimizer's steps took were:"
            " nothing was stopped",
            may_raise=False,
        )

    def _due(self, *remarks: str) -> Incident | None:
        incident = self.release()
        if incident is not None:  # otherwise another thread's step was first
            incident.remark(*remarks)
        return incident

    def _drop(self) -> None:
        self._pending = None

    def _has_fallen(self, pending: _Pending) -> bool:
        scale = None if pending.scale is None else self._scale()
        return pending.scale is not None and scale is not None and scale < pending.scale

    def _scale(self) -> float | None:
        if self._scaler is None:
            self._scaler = find_scaler()
        scaler = self._scaler()
        try:
            return None if scaler is None else float(scaler.get_scale())
        except Exception:
            suppressed("a GradScaler of another make did not tell its scale")
            return None


def _is_nonfinite(gradient: Tensor | None) -> bool:
    return gradient is not None and read(gradient, "", "gradient").isfinite is False


def _tensor(weight: Weight) -> Tensor | None:
    module, name = weight
    owner = module()
    return None if owner is None else owner._parameters.get(name)


def _are_clean(pending: _Pending) -> bool:
    """Return whether all gradients that were not finite are gone, or finite by now."""
    tensors = [x for weight in pending.weights if (x := _tensor(weight)) is not None]
    return bool(tensors) and not any(_is_nonfinite(x.grad) for x in tensors)


def _steps(optimizer: Optimizer, weights: set[Weight]) -> bool:
    own = {id(x) for group in optimizer.param_groups for x in group["params"]}
    return not weights or any(id(_tensor(weight)) in own for weight in weights)


def is_inside_step() -> bool:
    """Return whether this runs for an optimizer's `step`, as the backward of a closure does.

    The `step` of a wrapper around an optimizer does not count: it may still ask a GradScaler whether there is to be a
    step. Lightning's and Accelerate's wrappers are of the optimizer's class, but PyTorch hooks only the inner step.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        own = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(own, Optimizer) and getattr(type(own).step, "hooked", False):
            return True
        frame = frame.f_back
    return False
