"""Guard of checkpoints: one with a non-finite weight or optimizer state does not replace a good one.

The guard reads what a save is given before a byte is written. A non-finite checkpoint of the watched model goes beside
the name that was asked for, and is a failure like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ..diagnosis.incident import Incident
from ..instrumentation.global_hooks import Handles
from ..instrumentation.wrapped_names import named_modules, parameter_names
from ..numerics._extension import instances_of
from ..numerics.readable import local_shard, only_our_dispatch
from ..recording.observe import holds_fractions, nonfinite, observe, state_tensors
from ..records.record import Frame, Record, Role
from ..report.finding import find
from ..util.job import rank
from ..util.visible import first_few, suppressing, visible, warn_user, without_wrappers
from .files import tensors_in
from .saves import Save, guard

_CHECKPOINT = "(checkpoint)"  # name of the frames of a checkpoint
_MAX_NAMED = 3


class _Owned(NamedTuple):
    """Tensor of the watched model, or of the state of an optimizer of it."""

    name: str
    role: Role
    tensor: Tensor
    allows_inf: bool = False


class CheckpointGuard:
    """Part of a Watch with `guard_checkpoints`, until `remove`.

    `reports` and `failures` are the watch's: what is known of the run, and what to do about a failure.
    """

    def __init__(self, reports: Any, failures: Any) -> None:
        self._reports = reports
        self._failures = failures
        self._raises = reports.options.on_nonfinite == "raise"
        self.keeps = False  # the older checkpoints, because the newest is not finite
        # Infinities that the model began with are meant: a buffer for a running minimum, a bias that masks.
        self._meant: set[str] = set()
        with suppressing("the infinities that a model began with could not be read"), only_our_dispatch():
            owned = {id(member.tensor): member.name for member in self._model_tensors()}
            bad = nonfinite(member.tensor for member in self._model_tensors())
            self._meant.update(owned[id(x)] for x in bad if not bool(torch.isnan(x).any()))
        self._handles = Handles(self, [guard(self)])

    def remove(self) -> None:
        """Guard no more saves."""
        self._handles.remove()

    def examine(self, save: Save) -> list[Record]:
        """Return the records of what is not finite in it and is the watched model's."""
        faults = list[Record]()
        with suppressing("a checkpoint could not be read"), only_our_dispatch(), torch.no_grad():
            tensors = [(keys, x) for keys, x in tensors_in(save.content) if holds_fractions(x)]
            bad = {id(x) for x in nonfinite(x for _, x in tensors)}
            owned = [*self._model_tensors(), *self._states()] if bad else []
            for keys, x in tensors:
                if id(x) in bad and (owner := _owner(owned, keys, x)) is not None:
                    label = owner.name if _storage(owner.tensor) == _storage(x) else ".".join(keys)
                    allows_inf = owner.allows_inf or owner.name in self._meant
                    faults.append(observe(x, label, owner.role, allows_inf))
        return [record for record in faults if record.is_fault]

    def wrote(self, save: Save) -> None:
        """Let older checkpoints be deleted again once a good one of the model is written."""
        if self.keeps:
            weights = list(self._model_tensors())
            self.keeps = all(_owner(weights, keys, x) is None for keys, x in tensors_in(save.content))

    def divert(self, save: Save, records: list[Record]) -> Any:
        """Save beside the name that was asked for, and act on the failure."""
        text = f"{save.function} was given {_named(records)}"
        if save.is_joint:
            error = save.refuse_on_all_ranks(text)
            self._act(save, records, f"{text}: no rank writes it")
            return self.refused(save, error)
        result = None
        if save.path is not None:
            result = save.write(beside := save.beside(save.path))
            self.keeps = True
            text += f": the checkpoint is in {beside}, and {save.path} is untouched"
        elif self._raises:
            text += ", and wrote nothing: an open file has no other name"
        else:
            result = save.write()
            text += ", and wrote it: an open file has no other name"
        self._act(save, records, text)
        return result

    def refused(self, save: Save, error: BaseException) -> None:
        """Raise the error of a save that a rank has refused, or warn where the run goes on."""
        if self._raises:
            raise error
        warn_user(f"{save.function}: a rank refused a checkpoint that is not finite, and no rank wrote it")

    def _act(self, save: Save, records: list[Record], text: str) -> None:
        recorder = self._reports.recorder
        batch = max(recorder.latest_batch, 0)
        frame = Frame(batch, _CHECKPOINT, save.function, tuple(records), "save")
        num_frames = recorder.frames_of_batch(batch)
        finding = find([frame], rank=rank(), num_frames=None if num_frames is None else num_frames + 1)
        incident = Incident(self._reports.latest(finding, batch, [frame]))
        incident.remark(text)
        self._failures.step_follows(incident)
        warn_user(text)

    # Whose tensors they are.

    def _model_tensors(self) -> Iterator[_Owned]:
        model = self._reports.model()
        for member in () if model is None else named_modules(model):
            allowed = self._reports.options.allows("inf", member.name)
            kinds: tuple[tuple[Role, Any], ...] = ("weight", "_parameters"), ("buffer", "_buffers")
            for role, attribute in kinds:
                for key, x in [*getattr(member.module, attribute).items()]:
                    if x is not None:
                        yield _Owned(f"{member.name}.{key}".removeprefix("."), role, x, allowed)

    def _states(self) -> Iterator[_Owned]:
        """Yield the states of all optimizers that have a parameter of the model, and of the one in the options."""
        model = self._reports.model()
        names = {} if model is None else parameter_names(model)
        for optimizer in instances_of(Optimizer):
            with suppressing("the state of an optimizer could not be listed"):
                parameters = [x for group in optimizer.param_groups for x in group["params"]]
                if optimizer is self._reports.options.optimizer or any(id(x) in names for x in parameters):
                    for state in state_tensors(optimizer, names):
                        yield _Owned(state.label, "weight" if state.is_parameter else "buffer", state.tensor)


def _owner(owned: list[_Owned], keys: tuple[str, ...], x: Tensor) -> _Owned | None:
    """Return the tensor that `x` shares memory with, or is a copy of by shape and by the keys that lead to it."""
    storage, plain = _storage(x), [without_wrappers(key) for key in keys]
    shared = (member for member in owned if storage and _storage(member.tensor) == storage)
    copied = (member for member in owned if member.tensor.shape == x.shape and _is_named(member.name, plain))
    return next(shared, None) or next(copied, None)


def _is_named(name: str, keys: list[str]) -> bool:
    """Return whether the keys have the name, or a longer one with it inside; for a state, whether they end in its."""
    state, bracket, _ = name.partition("[")
    if bracket:
        return "state" in keys and keys[-1] == state
    return any(key == name or ("." in name and f".{name}." in f".{key}.") for key in keys)


def _storage(x: Tensor) -> int:
    """Return the address of the tensor's memory, of a DTensor's shard; 0 where it has none."""
    with suppressing("a tensor in a checkpoint has no storage"):
        local = local_shard(x)
        return (x if local is None else local).untyped_storage().data_ptr()
    return 0


def _named(records: list[Record]) -> str:
    """Return `3 tensors that are not finite (0.weight, 0.bias, 1.weight)`, with a few of the names."""
    names = first_few([visible(record.label) or "the tensor" for record in records], _MAX_NAMED)
    which = "a tensor that is" if len(records) == 1 else f"{len(records):,} tensors that are"
    return f"{which} not finite ({names})"
