"""Guard of checkpoints: one with a non-finite weight or optimizer state does not replace a good one.

The guard reads what a save is given before a byte is written. A non-finite checkpoint of the watched model goes beside
the name that was asked for, and is a failure like any other.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..diagnosis.incident import Incident
from ..instrumentation.global_hooks import Handles
from ..instrumentation.saving import Save, guard, is_refusal
from ..instrumentation.wrapped_names import named_modules, parameter_names
from ..numerics._extension import instances_of
from ..numerics.ranges import abs_range
from ..numerics.readable import is_plain, local_shard, only_our_dispatch
from ..ranks.meetings import all_join
from ..recording.observe import holds_fractions, observe, read
from ..recording.optimizer_state import state_tensors
from ..records.record import Frame, Record, Role
from ..report.finding import find
from ..util.job import rank
from ..util.modules import each_module, each_parameter
from ..util.visible import suppressed, suppressing, visible, warn_user, without_wrappers
from .failure_handler import FailureHandler
from .reports import Reports

# Name of the frames of a checkpoint.
_CHECKPOINT = "(checkpoint)"
# A smaller tensor is always read. Of a larger one that nothing says has changed, one block in 64 is.
_SMALL = 2**20
_BLOCK, _ONE_IN = 4096, 64
_SCALARS = (int, float, complex, str, bytes, type(None), type, ModuleType, FunctionType)
# An object with one of these is not what its attributes are.
_PICKLED_OTHERWISE = ("__getstate__", "__reduce__", "__reduce_ex__")
_MAX_NAMED = 3

Keys = tuple[str, ...]


class _Own(NamedTuple):
    """Tensor of the watched model, or of the state of an optimizer of it."""

    name: str
    role: Role
    tensor: Tensor
    allows_inf: bool = False


class CheckpointGuard:
    """Part of a Watch with `guard_checkpoints`, until `remove`."""

    def __init__(self, reports: Reports, failures: FailureHandler) -> None:
        self._reports = reports
        self._recorder = reports.recorder
        self._failures = failures
        self._action = reports.options.on_nonfinite
        # Threads that are inside a save whose content was read. The saves that it makes write parts of the same.
        self._inside: set[int] = set()
        self._keeps = False
        self._has_warned = False
        # Infinities that the model began with are meant: a buffer for a running minimum, a bias that masks.
        self._meant: set[str] = set()
        with suppressing("the infinities that a model began with could not be told"), only_our_dispatch():
            self._meant.update(
                one.name
                for one in self._model_tensors()
                if not self._is_finite(one.tensor) and not bool(torch.isnan(one.tensor).any())
            )
        this = weakref.ref(self)

        def save(one: Save) -> Any:
            return one.write() if (own := this()) is None else own._save(one)

        def keeps() -> bool:
            return (own := this()) is not None and own._keeps

        self._handles = Handles(self, [guard(save, keeps)])

    def remove(self) -> None:
        """Guard no more saves."""
        self._handles.remove()

    def _save(self, save: Save) -> Any:
        thread = threading.get_ident()
        if save.is_beside or save.is_deferred or thread in self._inside:
            return save.write()
        if save.path is None and isinstance(save.content, Tensor):  # DCP writes each tensor so
            return save.write()
        save.evaluate()
        own: list[Record] = []
        others: list[Record] = []
        with suppressing("a checkpoint could not be read"), only_our_dispatch(), torch.no_grad():
            own, others = self._faults(save)
        if own:
            return self._divert(save, own)
        if others and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"{save.function} was given {_named(others)}, of no weight of the watched model nor a state of its"
                " optimizer: it is saved as asked"
            )
        self._inside.add(thread)
        try:
            saved = save.write()
        except BaseException as error:
            if save.num_ranks == 1 or not is_refusal(error):
                raise
            return self._divert_with_peers(save, error, None, "another rank refused it")
        finally:
            self._inside.discard(thread)
        if self._keeps and self._has_weights(save):
            self._keeps = False
        return saved

    # What is read.

    def _faults(self, save: Save) -> tuple[list[Record], list[Record]]:
        """Return the rows of what is not finite: of the watched model, and of others."""
        if save.is_raw and (model := self._reports.model()) is not None:
            # Raw memory has no version, but the parameter that owns it does.
            plain = filter(is_plain, each_parameter(model))
            save.owners = {(x.data_ptr(), x.nbytes, x.dtype): x for x in plain}
        nonfinite = [(keys, x) for keys, x in tensors_in(save.content) if not self._is_finite(x)]
        own: list[Record] = []
        others: list[Record] = []
        known = _Known([*self._model_tensors(), *self._states()]) if nonfinite else None
        for keys, x in nonfinite:
            owner = None if known is None else known.owner(keys, x)
            label = (
                owner.name if owner is not None and _storage(owner.tensor) == _storage(x) else ".".join(keys)
            )
            role: Role = "buffer" if owner is None else owner.role
            allows_inf = owner is not None and (owner.allows_inf or owner.name in self._meant)
            row = observe(x, label, role, allows_inf)
            if row.is_fault:
                (others if owner is None else own).append(row)
        return own, others

    def _is_finite(self, x: Tensor) -> bool:
        if not holds_fractions(x):
            return True
        if is_plain(x) and x.is_cpu and x.nbytes < _SMALL:
            with suppress(Exception):  # a record takes ten times as long, and says why nothing could be read
                return abs_range(x).isfinite
        elif is_plain(x) and x.is_contiguous() and x.nbytes >= _SMALL:
            before = self._recorder.counters["bytes_read"]
            known = self._recorder.is_finite(x)
            if known and self._recorder.counters["bytes_read"] == before:
                # Nothing tells of a write through `.data`, as some averages of weights make it.
                return all(abs_range(part).isfinite for part in _sample(x))
            if known is not None:
                return known
        return read(x, "", "weight").isfinite is not False

    # Whose it is.

    def _model_tensors(self) -> Iterator[_Own]:
        model, options = self._reports.model(), self._reports.options
        for one in () if model is None else named_modules(model):
            allowed = options.allows_inf(one.name)
            roles: tuple[tuple[Role, Any], ...] = (
                ("weight", one.module._parameters),
                ("buffer", one.module._buffers),
            )
            for role, held in roles:
                for key, x in list(held.items()):
                    if x is not None:
                        yield _Own(f"{one.name}.{key}" if one.name else key, role, x, allowed)

    def _states(self) -> Iterator[_Own]:
        """Yield the states of all optimizers that have a parameter of the model, and of the one in the options."""
        model = self._reports.model()
        names = {} if model is None else parameter_names(model)
        for optimizer in instances_of(Optimizer):
            with suppressing("an optimizer did not tell its state"):
                held = [x for group in optimizer.param_groups for x in group["params"]]
                if optimizer is self._reports.options.optimizer or any(id(x) in names for x in held):
                    for one in state_tensors(optimizer, names):
                        yield _Own(one.label, "weight" if one.is_parameter else "buffer", one.tensor)

    def _has_weights(self, save: Save) -> bool:
        known = _Known(list(self._model_tensors()))
        return any(known.owner(keys, x) is not None for keys, x in tensors_in(save.content))

    # What follows.

    def _divert(self, save: Save, rows: list[Record]) -> Any:
        """Save beside the name that was asked for, and act on the failure."""
        incident = self._incident(save, rows)
        is_raised = self._action == "raise"
        path, said = save.path, f"{save.function} was given {_named(rows)}"
        if save.num_ranks > 1:
            try:  # only the error of the save itself reaches the ranks that wait for this one
                future = save.fail_on_all_ranks(said)
            except BaseException as error:
                if not is_refusal(error):
                    raise
                return self._divert_with_peers(save, error, incident, said)
            self._act(incident, f"{said}: no rank writes it")  # in a process of its own
            return future
        if path is None and not is_raised:
            self._act(incident, f"{said}, and wrote it: an open file has no other name")
            return save.write()
        place = save.open_path if path is None else path
        if place is None:
            return self._act(incident, f"{said}, and wrote nothing")
        other = save.beside(place)
        saved = save.write_to(other, now=is_raised)
        self._keeps = True
        # To open a file for writing empties it, before any save.
        left = "untouched" if path is not None else f"open, with {os.path.getsize(place):,} bytes in it"
        self._act(incident, f"{said}: the checkpoint is in {other}, and {place} is {left}")
        return saved

    def _divert_with_peers(
        self, save: Save, error: BaseException, incident: Incident | None, said: str
    ) -> Any:
        """Save beside the name on all ranks, if all are guarded. Each has failed with `error` before it wrote."""
        path, timeout = save.path, self._reports.options.peer_timeout
        has_joined = path is not None and timeout > 0 and all_join(path, save.num_ranks, timeout)
        saved = None
        if path is not None and has_joined:
            other = save.beside(path)
            saved = save.write_to(other)
            self._keeps = True
            said += f": the checkpoint is in {other}, and {path} is untouched"
        if incident is not None:
            self._act(incident, said)
        elif self._action != "raise":
            warn_user(f"{save.function}: {said}")
        if self._action == "raise" or not has_joined:
            raise error
        return saved

    def _act(self, incident: Incident, said: str) -> None:
        incident.remark(said)
        self._failures.step_follows(incident)
        warn_user(said)

    def _incident(self, save: Save, rows: list[Record]) -> Incident:
        batch = max(self._recorder.latest_batch, 0)
        frame = Frame(batch, _CHECKPOINT, save.function, tuple(rows), "save")
        num_frames = self._recorder.frames_of_batch(batch)
        finding = find([frame], rank=rank(), num_frames=None if num_frames is None else num_frames + 1)
        return Incident(self._reports.latest(finding, batch, [frame]))


class _Known:
    """Look-up of the tensors of the watched model and its optimizers: by memory, and copies by name and shape."""

    def __init__(self, own: Iterable[_Own]) -> None:
        self._by_storage: dict[int, _Own] = {}
        self._by_shape: dict[tuple[int, ...], list[_Own]] = {}
        for one in own:
            if storage := _storage(one.tensor):
                self._by_storage.setdefault(storage, one)
            self._by_shape.setdefault(tuple(one.tensor.shape), []).append(one)

    def owner(self, keys: Keys, x: Tensor) -> _Own | None:
        """Return the tensor that `x` shares memory with or is a copy of, found under these keys."""
        found = self._by_storage.get(_storage(x))
        alike = self._by_shape.get(tuple(x.shape), ()) if found is None else ()
        plain = [without_wrappers(key) for key in keys]
        return found or next((one for one in alike if _is_named(one.name, plain)), None)


def _is_named(name: str, keys: list[str]) -> bool:
    """Return whether the keys have the name, or a longer one with it inside; for a state, whether they end in its."""
    state, bracket, _ = name.partition("[")
    if bracket:
        return "state" in keys and keys[-1] == state
    return any(key == name or ("." in name and f".{name}." in f".{key}.") for key in keys)


def tensors_in(content: Any) -> Iterator[tuple[Keys, Tensor]]:
    """Yield each tensor that a pickle of `content` would hold, with the keys that lead to it, once for each place.

    The keys into a module are the names of its state_dict.
    """
    seen: set[int] = set()
    left: list[tuple[Keys, Any]] = [((), content)]
    while left:
        keys, value = left.pop()
        if isinstance(value, Tensor):
            yield keys, value
        elif id(value) not in seen:
            seen.add(id(value))
            inside = [(key, one) for key, one in _children(value) if not isinstance(one, _SCALARS)]
            left += [((*keys, key), one) for key, one in reversed(inside)]


def _children(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        return [
            (f"{path}.{key}" if path else key, x)
            for path, module in each_module(value)
            for held in (module._parameters, module._buffers)
            for key, x in held.items()
        ]
    if isinstance(value, Mapping):
        return [(str(key) if isinstance(key, str | int) else type(key).__name__, value[key]) for key in value]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [(str(position), one) for position, one in enumerate(value)]
    if isinstance(value, Optimizer):
        return [("state", value.state), ("param_groups", value.param_groups)]
    if any(name in vars(kind) for kind in type(value).__mro__[:-1] for name in _PICKLED_OTHERWISE):
        return ()
    return list(getattr(value, "__dict__", {}).items())


def _storage(x: Tensor) -> int:
    """Return the address of the tensor's memory, of a DTensor's shard; 0 where it has none."""
    try:
        local = local_shard(x)
        return (x if local is None else local).untyped_storage().data_ptr()
    except Exception:
        suppressed("a tensor in a checkpoint has no storage")
        return 0


def _sample(x: Tensor) -> tuple[Tensor, Tensor]:
    flat = x.detach().view(-1)
    return flat[: flat.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK)[::_ONE_IN], flat[-_BLOCK:]


def _named(rows: list[Record]) -> str:
    """Return `3 tensors that are not finite (0.weight, 0.bias, 1.weight)`, with a few of the names."""
    names = ", ".join(visible(row.label) or "the tensor" for row in rows[:_MAX_NAMED])
    more = ", ..." if len(rows) > _MAX_NAMED else ""
    which = "a tensor that is" if len(rows) == 1 else f"{len(rows):,} tensors that are"
    return f"{which} not finite ({names}{more})"
