"""Guard of checkpoints: one with a non-finite weight or optimizer state does not replace a good one.

It reads what a save is given before a byte is written. A non-finite checkpoint of the watched model goes beside the
name that was asked for, and is a failure like any other. A function that saves is replaced in every module that has it.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from functools import partial, reduce, wraps
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, distributed
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import GlobalHooks, Handles, weakly
from ..numerics._extension import instances_of
from ..numerics.readable import local_shard, only_our_dispatch
from ..recording.observe import holds_fractions, nonfinite, observe, state_tensors
from ..records.record import Frame, Record, Role
from ..util.messages import first_few, plural, suppressing, visible, warn_user, without_wrappers
from ..util.program import parameters_of, when_imported
from .files import DCP, tensors_in

_MARK = ".nonfinite"  # in the name of a checkpoint that goes beside a good one


class Seam(NamedTuple):
    """Function or method that saves checkpoints, and its arguments for the content and the place."""

    module: str
    name: str
    called: str = ""  # in words; "" for a function that moves or deletes files
    content: str = ""
    place: str = ""
    is_folder: bool = False


_LIGHTNING = ("lightning.fabric.plugins.io.torch_io", "lightning_fabric.plugins.io.torch_io")
_SEAMS = (
    Seam("torch.serialization", "save", "torch.save", "obj", "f"),
    Seam("safetensors.torch", "save_file", "safetensors", "tensors", "filename"),
    Seam("safetensors.torch", "save", "safetensors", "tensors"),
    # By itself, because it makes another error of each ValueError.
    Seam("safetensors.torch", "save_model", "safetensors", "model", "filename"),
    # `async_save` calls these in a thread: the second one sends the content to a process.
    Seam(f"{DCP}.state_dict_saver", "save", f"{DCP}.save", "state_dict", "checkpoint_id", is_folder=True),
    Seam(f"{DCP}._async_process_executor", "_AsyncCheckpointProcess.save", f"{DCP}.async_save", "staged_state_dict",
         "checkpoint_id", is_folder=True),
    # Whole, because a model of several files is one checkpoint, and the files of the one before are deleted first.
    Seam("transformers.modeling_utils", "PreTrainedModel.save_pretrained", "save_pretrained", "state_dict",
         "save_directory", is_folder=True),
    # Whole, because it saves into memory and then replaces the file.
    *(Seam(module, "TorchCheckpointIO.save_checkpoint", "Lightning", "checkpoint", "path") for module in _LIGHTNING),
    # These delete a checkpoint that has a successor.
    *(Seam(module, "TorchCheckpointIO.remove_checkpoint") for module in _LIGHTNING),
    Seam("transformers.trainer", "rotate_checkpoints"),
    # A program that saves under a temporary name gives the checkpoint its own by these.
    *(Seam("os", name, place="src") for name in ("rename", "replace")),
)  # fmt: skip
_Owned: TypeAlias = tuple[str, Tensor]  # of the watched model, or of the state of an optimizer of it


class CheckpointGuard:
    """Part of a Watch with `guard_checkpoints`, which reads each save in any thread, until `remove()`.

    `reports` and `failures` are the watch's: what is known of the run, and what to do about a failure.
    """

    def __init__(self, reports: Any, failures: Any) -> None:
        self._reports, self._failures = reports, failures
        self.raises = reports.options.on_nonfinite == "raise"
        self.keeps = False  # the older checkpoints, because the newest is not finite
        self._beside: dict[str, str] = {}  # where others are, by the paths that were asked for
        # Infinities that the model began with are meant: a buffer for a running minimum, a bias that masks.
        self._meant = frozenset[str]()
        records = self.examine(reports.model())
        self._meant = frozenset(x.label for x in records if x.health is not None and not x.health.num_nan)
        self.remove = Handles(self, [_guards.add(weakly(self._join))]).remove

    def _join(self, guards: list[CheckpointGuard]) -> None:
        guards.append(self)

    def examine(self, content: Any) -> list[Record]:
        """Return the records of what is not finite in it and is the watched model's, also where that is meant."""
        records = list[Record]()
        with suppressing("a checkpoint could not be read"), only_our_dispatch(), torch.no_grad():
            tensors = [(keys, x) for keys, x in tensors_in(content) if holds_fractions(x)]
            bad = {id(x) for x in nonfinite(x for _, x in tensors)}
            owned = [*self._model_tensors(), *self._states()] if bad else []
            for keys, x in tensors:
                if id(x) in bad and (owner := _owner(owned, keys, x)) is not None:
                    name, tensor = owner
                    label = name if _storage(tensor) == _storage(x) else ".".join(keys)
                    role: Role = "weight" if isinstance(tensor, torch.nn.Parameter) else "buffer"
                    module, _, key = name.rpartition(".")
                    allows_inf = not key.endswith("]") and self._reports.options.allows("inf", module)
                    records.append(observe(x, label, role, allows_inf or name in self._meant))
        return records

    def divert(self, save: Save, records: list[Record]) -> Any:
        """Save beside the name that was asked for, and act on the failure."""
        names = first_few([visible(record.label) or "the tensor" for record in records])
        text = f"{save.seam.called} was given {plural(len(records), 'non-finite tensor')} ({names})"
        self.keeps, changed = True, dict[str, Any]()
        if save.is_joint():
            changed, text = {"planner": CheckpointRefusedError(text)}, f"{text}: no rank writes it"
        elif save.path is not None:
            beside = self._beside[save.file] = _marked(save.path, save.seam.is_folder)
            changed = {save.seam.place: beside}
            text += f": the checkpoint is in {beside}, and {save.path} is untouched"
        else:
            self._beside[save.file] = save.file
            text += f", and wrote {'nothing' if self.raises else 'it'}: an open file has no other name"
        # First, as the other ranks of a joint save wait for this one.
        result = save.write(changed) if changed or not self.raises else None
        batch = max(self._reports.recorder.latest_batch, 0)
        frame = Frame(batch, "(checkpoint)", save.seam.called, tuple(records), "save")
        incident = self._reports.of_frame(frame)
        incident.remark(text)
        self._failures.step_follows(incident)
        warn_user(text)
        return result

    def follow(self, save: Save) -> dict[str, str]:
        """Return where a bad checkpoint that the program moves is, and where it stays beside the good one."""
        if not os.path.lexists(beside := self._beside.pop(save.file, "")):
            return {}
        target = os.path.abspath(os.fsdecode(save.arguments["dst"]))
        marked = self._beside[target] = _marked(target, os.path.isdir(beside))
        return {"src": beside, "dst": marked}

    def note(self, save: Save) -> None:
        """Let go of older checkpoints once a good one of the model is saved."""
        self._beside.pop(save.file, None)
        if self.keeps:
            with suppressing("a checkpoint could not be read"):
                weights = list(self._model_tensors())
                self.keeps = all(_owner(weights, keys, x) is None for keys, x in tensors_in(save.content))

    def _model_tensors(self) -> Iterator[_Owned]:
        for keys, x in tensors_in(self._reports.model()):
            yield without_wrappers(*keys), x

    def _states(self) -> Iterator[_Owned]:
        """Yield the states of all optimizers that have a parameter of the model, and of the one in the options."""
        names = {id(x): name for name, x in self._model_tensors()}
        for optimizer in instances_of(Optimizer):
            with suppressing("the state of an optimizer could not be listed"):
                is_models = any(id(x) in names for x in parameters_of(optimizer))
                if is_models or optimizer is self._reports.options.optimizer:
                    yield from ((label, x) for _, label, x in state_tensors(optimizer, names))


def _owner(owned: list[_Owned], keys: tuple[str, ...], x: Tensor) -> _Owned | None:
    """Return the tensor that `x` shares memory with, or is a copy of by shape and by the keys that lead to it."""
    storage, plain = _storage(x), [without_wrappers(key) for key in keys]
    shared = (member for member in owned if storage and _storage(member[1]) == storage)
    copied = (member for member in owned if member[1].shape == x.shape and _is_named(member[0], plain))
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


def _marked(path: str, is_folder: bool) -> str:
    stem, ending = (path.rstrip("/"), "") if is_folder else os.path.splitext(path)
    return f"{stem}{_MARK}{ending}"


class CheckpointRefusedError(RuntimeError):
    """Reason why a rank has no part in a save, and its planner, which a process of `async_save` gets pickled."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Raise the error at the beginning of the save."""
        raise self


_is_saving = ContextVar("nanwatch.is_saving", default=False)  # a save calls further guarded functions


class Save:
    """One call of a guarded function: its content and place, and how to go on.

    `path` is None for an open file and for a storage of the user's own. `file` is the whole path, also of an open file.
    """

    def __init__(self, seam: Seam, bound: inspect.BoundArguments, original: Any, guards: Any) -> None:
        self.seam, self._bound, self._original, self._guards = seam, bound, original, guards
        self.arguments = arguments = bound.arguments
        content, place = arguments.get(seam.content), arguments.get(seam.place)
        self.content = arguments.get("self") if content is None else content
        if place is None:
            place = getattr(arguments.get("storage_writer"), "path", None)
        self.path = os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else None
        name = getattr(place, "name", None) if self.path is None else self.path
        self.file = os.path.abspath(name) if isinstance(name, str) else ""

    def is_joint(self) -> bool:
        """Return whether several ranks save the same checkpoint, and fail or succeed together."""
        get, is_job = self.arguments.get, distributed.is_available() and distributed.is_initialized()
        if not is_job or not self.seam.called.startswith(DCP) or get("no_dist"):
            return False
        return bool(get("use_collectives", True)) and distributed.get_world_size(get("process_group")) > 1

    def write(self, changed: dict[str, Any]) -> Any:
        """Save as asked, or with the `changed` arguments, past all guards."""
        if changed and (writer := self.arguments.get("storage_writer")) is not None:
            changed["storage_writer"] = copy.copy(writer)  # it would remember the path
        self.arguments.update(changed)
        token = _is_saving.set(True)
        try:
            return self._original(*self._bound.args, **self._bound.kwargs)
        except BaseException as error:
            # A CheckpointException, which is no Exception, has the failures by rank.
            failures = getattr(error, "failures", {}) if type(error).__name__ == "CheckpointException" else {}
            is_refusal = any(isinstance(x, CheckpointRefusedError) for x, _ in failures.values())
            if not is_refusal or (not changed and any(guard.raises for guard in self._guards)):
                raise
            if not changed:
                warn_user(f"{self.seam.called}: a rank refused a non-finite checkpoint, and no rank wrote it")
        finally:
            _is_saving.reset(token)


def _install(_call: object) -> SimpleNamespace:
    undo = ExitStack()
    for seam in _SEAMS:
        undo.callback(when_imported(seam.module, partial(_guard, seam, undo)))
    return SimpleNamespace(remove=undo.close)


def _guard(seam: Seam, undo: ExitStack) -> None:
    """Replace a method in its class, or a function in every module, until `undo`."""
    with suppressing(f"{seam.module}.{seam.name} could not be guarded"):  # in another version of the library
        *owners, name = seam.name.split(".")
        owner: Any = reduce(getattr, owners, sys.modules[seam.module])
        function = _guarded(seam, original := vars(owner)[name])
        undo.callback(_replace, owner, function, original)
        _replace(owner, original, function)


def _replace(owner: Any, before: Any, after: Any) -> None:
    """Replace a function in a class, or in every module that has it by now: Trainer and Lightning have imported it."""
    modules = [module for module in [*sys.modules.values()] if issubclass(type(module), ModuleType)]
    for place in [owner] if isinstance(owner, type) else modules:
        # Any other way to ask a module of importlib's LazyLoader for its names would run it.
        for key, value in [*object.__getattribute__(place, "__dict__").items()]:
            if value is before:
                setattr(place, key, after)


_guards = GlobalHooks(_install)  # hook(guards), which puts a guard into the list


def _guarded(seam: Seam, original: Callable[..., Any]) -> Any:
    signature = inspect.signature(original)

    @wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        guards: list[CheckpointGuard] = []
        if not _is_saving.get():
            _guards.call(guards)
        save = None
        # The function itself says what is wrong with its arguments. There may be no working directory any more.
        with suppress(TypeError, OSError):
            save = Save(seam, signature.bind(*args, **kwargs), original, guards) if guards else None
        # No guard reads one tensor of many of DCP, which its threads write.
        if save is None or (save.path is None and isinstance(save.content, Tensor)):
            return original(*args, **kwargs)
        if not seam.called:
            if not seam.place and any(guard.keeps for guard in guards):
                return None
            return save.write(next(filter(None, [guard.follow(save) for guard in guards]), {}))
        for guard in guards:
            if faults := [record for record in guard.examine(save.content) if record.is_fault]:
                return guard.divert(save, faults)
        result = save.write({})
        for guard in guards:
            guard.note(save)
        return result

    return guarded
