"""Guard between non-finite gradients and the weights: a backward's failure is deferred until a step would take it.

The failure is not raised at once: with a GradScaler an inf in the gradients is none, as the step is skipped and the
scale goes down. PyTorch gives no signal when GradScaler skips a step, so the guard infers it afterwards: the optimizer
says `found_inf` (fused ones), the scale has fallen, or the non-finite gradients are gone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..diagnosis.incident import Incident
from ..instrumentation.global_hooks import find_scaler
from ..numerics.readable import only_our_dispatch
from ..recording.events import Recorder
from ..recording.observe import nonfinite
from ..records.note import Note
from ..report import text
from ..report.events import SkippedStep
from ..util.visible import suppressed, warn_user
from .options import Options

# Skipped steps that are kept. All are counted.
_MAX_KEPT = 100

# A weight: its module, and its name in it.
Weight = tuple["weakref.ref[nn.Module]", str]


@dataclass(slots=True)
class _Pending:
    """The deferred failure. `is_skipped`: the optimizer itself said so."""

    incident: Incident
    batches: set[int]
    weights: set[Weight]
    scale: float | None
    is_skipped: bool = False

    def is_clean(self) -> bool:
        """Return whether all gradients that were not finite are gone, or finite by now."""
        tensors = _tensors(self.weights)
        return bool(tensors) and not nonfinite(x.grad for x in tensors if x.grad is not None)


class OptimizerGuard:
    """Failure of the latest backward, deferred until an optimizer's step is about to take its gradients.

    `defer` and `check_step` return an incident that is due now. The caller acts on it before the weights change. The
    guard tells `recorder` which gradients are no fault after all. Where the options name no GradScaler, the guard looks
    for one when it first needs it. `tell` gets each skipped step.
    """

    def __init__(
        self, recorder: Recorder, options: Options, tell: Callable[[SkippedStep], object] = lambda _: None
    ) -> None:
        self._recorder = recorder
        self._tell = tell
        self.skipped: deque[SkippedStep] = deque(maxlen=_MAX_KEPT)
        self.num_skipped = 0
        self.num_untaken = 0  # non-finite backwards after which a step took finite gradients
        self._max_skipped_steps = options.max_skipped_steps
        self._is_given = options.scaler is not None
        self._scaler: Callable[[], Any] | None = weakref.ref(options.scaler) if self._is_given else None
        self._num_scales = 0
        self._pending: _Pending | None = None
        self._in_a_row = 0
        self._skipped_weights: set[Weight] = set()  # of the latest skipped step

    # The backward

    def defer(self, incident: Incident, batches: set[int], weights: set[Weight]) -> Incident | None:
        """Defer the failure of a backward: the gradients of these weights, in these batches, are not finite.

        Return the incident if it is due at once, as too many steps in a row were skipped.
        """
        if (pending := self._pending) is None:
            self._pending = _Pending(incident, batches, weights, self._scale())
        else:
            # New sets: another thread may iterate over the old ones.
            pending.batches, pending.weights = pending.batches | batches, pending.weights | weights
        if self._in_a_row < self._max_skipped_steps:
            return None
        count, self._in_a_row = self._in_a_row, 0
        due = self.release()
        if due is not None:  # otherwise another thread's step was first
            due.remark(
                f"the {count} steps before this one were skipped, as gradients were not finite;"
                f" {self._max_skipped_steps} in a row are the most"
            )
        return due

    @property
    def pending(self) -> Incident | None:
        """The incident of the deferred backward."""
        return None if self._pending is None else self._pending.incident

    def release(self) -> Incident | None:
        """Return that incident, and drop it."""
        incident, self._pending = self.pending, None
        return incident

    # The step that follows, or does not

    def check_step(self, optimizer: Optimizer, *, is_nonfinite: bool) -> Incident | None:
        """Return the incident that a step of `optimizer` is about to take; None lets it pass.

        is_nonfinite: a gradient of the optimizer's parameters is not finite.
        """
        pending = self._pending
        if pending is None:
            if self._in_a_row and _steps(optimizer, self._skipped_weights):
                self._in_a_row = 0
            return None
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor) and bool(found_inf.detach().any()):
            pending.is_skipped = True
            scale = getattr(optimizer, "grad_scale", None)
            if pending.scale is None and isinstance(scale, Tensor):
                pending.scale = float(scale)
        elif is_nonfinite:
            return self.release()
        elif not pending.weights or pending.is_clean():
            self._let_pass(pending)
        return None

    def settle(self, *, only_known: bool = False) -> None:
        """Find out whether the step of the deferred backward was skipped meanwhile.

        only_known: gradients that are merely gone do not count.
        """
        if (pending := self._pending) is None:
            return
        before, after = pending.scale, self._scale()
        is_known = pending.is_skipped or (before is not None and after is not None and after < before)
        if not is_known and (only_known or not pending.is_clean()):
            return
        if not (is_known or self._is_given):
            before = None  # the scaler that was found has no part in this
        self._pending = None
        finding = pending.incident.finding
        step = SkippedStep(finding.batch, before, after, finding)
        self.skipped.append(step)
        self.num_skipped += 1
        self._in_a_row += 1
        self._skipped_weights = pending.weights
        self._recorder.excuse_gradients(sorted(pending.batches), step.note)
        self._tell(step)

    def _let_pass(self, pending: _Pending) -> None:
        """Warn of the 1st, 2nd, 4th, 8th backward that the user has mended: 100 such batches give 7 lines."""
        self._pending = None
        self._recorder.excuse_gradients(sorted(pending.batches), Note("not_taken"))
        self.num_untaken = count = self.num_untaken + 1
        if count.bit_count() == 1:
            so_far = f" ({count:,} such backwards so far)" if count > 1 else ""
            warn_user(
                f"{text.summary(pending.incident.finding)}; the gradients that the optimizer's step takes are finite:"
                f" nothing was stopped{so_far}"
            )

    # The GradScaler

    @property
    def has_scaler(self) -> bool:
        """True if the GradScaler is known."""
        return self._scaler is not None and self._scaler() is not None

    def note_scale(self) -> Tensor | None:
        """Return a copy of the present scale on its own device, without a wait; None where no scaler is found."""
        self._num_scales += 1
        if self._scaler is None and self._num_scales.bit_count() == 1:
            # Look before anything is non-finite, because later the scale is another; ever less often in vain.
            scaler = find_scaler()
            self._scaler = None if scaler() is None else scaler
        scale = None if self._scaler is None else getattr(self._scaler(), "_scale", None)
        try:
            with only_our_dispatch(), torch.no_grad():
                return scale.detach().clone() if isinstance(scale, Tensor) else None
        except RuntimeError:  # no memory, or a device that has failed
            return None

    def _scale(self) -> float | None:
        if self._scaler is None:
            self._scaler = find_scaler()
        return scale_of(self._scaler())


def scale_of(scaler: Any) -> float | None:
    """Return the present loss scale of a GradScaler, if there is one; None too for 0, inf and nan."""
    try:
        scale = 0.0 if scaler is None else float(scaler.get_scale())
    except Exception:
        suppressed("a GradScaler of another make did not tell its scale")
        return None
    return scale if scale and isfinite(scale) else None


def _tensors(weights: set[Weight]) -> list[Tensor]:
    living = ((module(), name) for module, name in weights)
    parameters = [module._parameters.get(name) for module, name in living if module is not None]
    return [x for x in parameters if x is not None]


def _steps(optimizer: Optimizer, weights: set[Weight]) -> bool:
    stepped = {id(x) for group in optimizer.param_groups for x in group["params"]}
    return not weights or any(id(x) in stepped for x in _tensors(weights))
