"""What is gathered between one audited step and the next: calls, backwards at a few weights, clips, modes."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ...instrumentation.grad_scaler import find_scaler
from ...numerics._extension import instances_of
from ...recording.events import Event, Recorder
from ...records.record import Frame
from . import blame, taps
from .backwards import Backward, BackwardProbes, Probe
from .samples import Key
from .view import Call, Clip, call_of, norm_of

_MOST_CALLS, _MOST_CLIPS = 8192, 64


class Window:
    """Gatherer for the audits of a model. Between audited steps it is closed, and gathers nothing."""

    def __init__(self, recorder: Recorder) -> None:
        self.casts: set[str] = set()  # device types under autocast
        self.called: set[str] = set()  # modules, without grad mode too
        self.num_calls = 0
        self._calls: deque[Call] = deque(maxlen=_MOST_CALLS)
        self._clips: deque[Clip] = deque(maxlen=_MOST_CLIPS)
        self._batches: deque[int] = deque(maxlen=256)  # in grad mode
        self._probes = BackwardProbes(lambda: recorder.latest_batch)
        self._frames = recorder.subscribe(Event.FRAME)
        self._reduced: deque[tuple[weakref.ref[Tensor], weakref.ref[Any]]] = deque(maxlen=_MOST_CALLS)
        for tap in taps.ALL:
            tap.add(self)

    @property
    def is_open(self) -> bool:
        """Return whether anything is gathered."""
        return self._frames.active

    def close(self) -> None:
        """Gather nothing until `renew`."""
        self._frames.active = False
        self._probes.close()
        self._calls.clear()
        self.casts.clear()
        self.called.clear()
        self._reduced.clear()

    def remove(self) -> None:
        """Close for good."""
        self.close()
        for tap in taps.ALL:
            tap.remove(self)

    def renew(self, optimizer: Optimizer) -> None:
        """Open, and forget the backwards and clips before a step of this optimizer."""
        self._frames.active = True
        self._probes.num_steps += 1
        own = _ids(optimizer)
        for probe in self._probes.probes:
            if id(probe.weight()) in own:
                probe.arrivals.clear()
        self._clips.clear()
        self._reduced.clear()

    def on_frame(self, frame: Frame) -> None:
        """Take a recorded call."""
        if self._frames.active and frame.phase == "forward":
            self.called.add(frame.name)
            if frame.batch in self._batches:
                self._calls.append(call_of(frame))
                self.num_calls += 1

    def batch_started(self, model: nn.Module, batch: int) -> None:
        """Take the start of a batch in grad mode."""
        if self._frames.active:
            self._batches.append(batch)
            self.casts |= {one for one in ("cpu", "cuda") if torch.is_autocast_enabled(one)}
            self._probes.open(model)

    def backward_starts(self, tensors: object, *_: object, **__: object) -> None:
        """Take a call of `Tensor.backward`."""
        self._probes.starts(tensors)

    def clipped(self, parameters: Any, max_norm: Any, *_: object, **__: object) -> None:
        """Take a call of clip_grad_norm_."""
        if self._frames.active:
            own = parameters if isinstance(parameters, list | tuple) else [parameters]
            weights = tuple(weakref.ref(x) for x in own)
            place = blame.place_of(sys._getframe(1))
            batch = self._probes.next.batch
            self._clips.append(Clip(weights, float(max_norm), norm_of(weights), place, batch))

    def reduced(self, tensor: Tensor, op: object = None, group: Any = None, *_: object, **__: object) -> None:
        """Take a call of torch.distributed.all_reduce. A group of None is that of all ranks."""
        if self._frames.active and group is not None:
            self._reduced.append((weakref.ref(tensor), weakref.ref(group)))

    def groups(self) -> dict[int, Any]:
        """Return the process group over which a tensor was reduced, by the tensor's id."""
        return {id(x): own for one, group in self._reduced if (x := one()) is not None and (own := group())}

    def clips(self, optimizer: Optimizer) -> list[Clip]:
        """Return the clips with the norms that the step is about to take: of all, for a clip of nothing."""
        held = [weakref.ref(x) for group in optimizer.param_groups for x in group["params"]]
        return [one._replace(at_step=norm_of(one.weights or held)) for one in self._clips]

    def calls_since(self, number: int) -> list[Call]:
        """Return the calls after the first `number`."""
        return list(islice(self._calls, max(0, len(self._calls) - (self.num_calls - number)), None))

    def probes(self, keys: set[Key]) -> list[Probe]:
        """Return the probes among these weights."""
        return [one for one in self._probes.probes if one.key in keys]

    def unstepped(self, least: int, resets: int) -> tuple[Optimizer, Backward] | None:
        """Return the optimizer that took none of so many backwards, whose gradients were thrown away `resets` times."""
        for probe in self._probes.probes:
            came = [one for one, _, is_full in probe.arrivals if is_full]
            # The gradients of a frozen discriminator are thrown away, too; its own step comes in between.
            if len({one.batch for one in came}) < least or probe.resets < resets:
                continue
            x = probe.weight()
            holder = next((one for one in instances_of(Optimizer) if id(x) in _ids(one)), None)
            if holder is not None and scale_of(came[-1].factors) is None:
                return holder, came[-1]
        return None


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(x) for group in getattr(optimizer, "param_groups", ()) for x in group["params"]}


def held_by_others(optimizer: Optimizer) -> frozenset[int]:
    """Return the ids of the weights that the other optimizers of this process hold."""
    return frozenset().union(*(_ids(one) for one in instances_of(Optimizer) if one is not optimizer))


def scale_of(factors: Sequence[float]) -> float | None:
    """Return the scale of the GradScaler in use, if a loss was multiplied with it."""
    scale = getattr(find_scaler()(), "_scale", None) if factors else None
    value = float(scale) if isinstance(scale, Tensor) else None
    is_used = value is not None and any(abs(one - value) <= 1e-3 * value for one in factors)
    return value if is_used else None


def is_taken_scaled(optimizer: Optimizer) -> bool:
    """Return whether a step takes gradients that nobody has divided by the scale; fused steps do so themselves."""
    if isinstance(getattr(optimizer, "grad_scale", None), Tensor):
        return False
    states = getattr(find_scaler()(), "_per_optimizer_states", {})
    stage = states[id(optimizer)]["stage"] if id(optimizer) in states else None
    return getattr(stage, "name", "READY") == "READY"
