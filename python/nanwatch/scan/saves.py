"""Functions that write checkpoints: while a guard is there, each of their calls goes through it.

A function is replaced in every module that has it, so that `save_pretrained`, Trainer, Lightning and accelerate are
covered, also where they imported it before. Modules that are imported later are changed then.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed

from ..util.imports import when_imported
from ..util.visible import suppressed


class Seam(NamedTuple):
    """Function or method that saves checkpoints, and its arguments for the content and the place."""

    module: str
    name: str
    called: str = ""  # in words; "" for one that deletes a checkpoint that has a successor
    content: str = ""
    place: str = ""
    is_folder: bool = False


_DCP = "torch.distributed.checkpoint"
_LIGHTNING = ("lightning.fabric.plugins.io.torch_io", "lightning_fabric.plugins.io.torch_io")
_SEAMS = (
    Seam("torch.serialization", "save", "torch.save", "obj", "f"),
    Seam("safetensors.torch", "save_file", "safetensors", "tensors", "filename"),
    # By itself, because it makes another error of each ValueError.
    Seam("safetensors.torch", "save_model", "safetensors", "model", "filename"),
    # `async_save` calls these in a thread: the second one sends the content to a process.
    Seam(f"{_DCP}.state_dict_saver", "save", f"{_DCP}.save", "state_dict", "checkpoint_id", is_folder=True),
    Seam(f"{_DCP}._async_process_executor", "_AsyncCheckpointProcess.save", f"{_DCP}.async_save", "staged_state_dict",
         "checkpoint_id", is_folder=True),
    # Whole, because a model of several files is one checkpoint, and the files of the one before are deleted first.
    Seam("transformers.modeling_utils", "PreTrainedModel.save_pretrained", "save_pretrained", "state_dict",
         "save_directory", is_folder=True),
    # Whole, because it saves into memory and then replaces the file.
    *(Seam(module, "TorchCheckpointIO.save_checkpoint", "Lightning", "checkpoint", "path") for module in _LIGHTNING),
    *(Seam(module, "TorchCheckpointIO.remove_checkpoint") for module in _LIGHTNING),
    Seam("transformers.trainer", "rotate_checkpoints"),
)  # fmt: skip
_MARK = ".nonfinite"


class Save:
    """One call that saves: its function in words, its content and place, and how to go on.

    `content` is nested containers of tensors, or a model. `path` is None for an open file and for a storage of the
    user's own.
    """

    def __init__(self, seam: Seam, bound: inspect.BoundArguments, original: Callable[..., Any]) -> None:
        self._seam = seam
        self._bound = bound
        self._original = original
        self.function = seam.called
        content, place = bound.arguments.get(seam.content), bound.arguments.get(seam.place)
        self.content = bound.arguments.get("self") if content is None else content
        if place is None:
            place = getattr(bound.arguments.get("storage_writer"), "path", None)
        self.path = os.fsdecode(place) if isinstance(place, str | os.PathLike) else None

    @property
    def is_left_alone(self) -> bool:
        """Whether no guard reads it: it goes beside a good one already, or is one tensor of many of DCP."""
        if self.path is None:
            return isinstance(self.content, torch.Tensor)
        return _MARK in os.path.basename(self.path.rstrip("/"))

    @property
    def is_joint(self) -> bool:
        """Whether several ranks save the same checkpoint, and fail or succeed together."""
        arguments, distributed = self._bound.arguments, torch.distributed
        is_alone = arguments.get("no_dist") or not arguments.get("use_collectives", True)
        is_job = distributed.is_available() and distributed.is_initialized()
        if not self.function.startswith(_DCP) or is_alone or not is_job:
            return False
        return distributed.get_world_size(arguments.get("process_group")) > 1

    def beside(self, path: str) -> str:
        """Return the name beside `path` for a checkpoint that is not to replace the one there."""
        stem, ending = (path.rstrip("/"), "") if self._seam.is_folder else os.path.splitext(path)
        return f"{stem}{_MARK}{ending}"

    def write(self, path: str | None = None, **changed: Any) -> Any:
        """Save as asked, or to another path, past all guards."""
        bound = copy.copy(self._bound)
        bound.arguments = {**bound.arguments, **changed}
        if path is not None:
            bound.arguments[self._seam.place] = path
            if (writer := bound.arguments.get("storage_writer")) is not None:
                bound.arguments["storage_writer"] = copy.copy(writer)  # it would remember the path
        token = _is_saving.set(True)
        try:
            return self._original(*bound.args, **bound.kwargs)
        finally:
            _is_saving.reset(token)

    def refuse_on_all_ranks(self, reason: str) -> BaseException:
        """Let the save fail on every rank that takes part, before anything is written. Return its error."""
        try:  # the other ranks wait, and only an error of the save itself reaches them
            self.write(planner=_Refusal(reason))
        except BaseException as error:  # CheckpointException is no Exception
            if is_refusal(error):
                return error
            raise
        raise AssertionError("a save without a plan has ended")


class CheckpointRefusedError(RuntimeError):
    """The reason why a rank has no part in a checkpoint."""


class _Refusal:
    """Planner of a save that has no plan. A process of `async_save` gets it pickled."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        raise CheckpointRefusedError(self._reason)


def is_refusal(error: BaseException) -> bool:
    """Return whether a rank has refused to save, which is why all ranks have failed to."""
    failures = getattr(error, "failures", None)
    reasons = failures.values() if isinstance(failures, dict) else ()
    return any(isinstance(reason[0], CheckpointRefusedError) for reason in reasons)


_is_saving = ContextVar("nanwatch.is_saving", default=False)  # a save calls further guarded functions
_changing = threading.RLock()  # reentrant: the garbage collector may remove a guard anywhere
_guards: list[weakref.ref[Any]] = []  # of CheckpointGuards
_undo: list[Callable[[], object]] = []


def guard(added: Any) -> SimpleNamespace:
    """Ask `added`, a CheckpointGuard, about each save in any thread, until `remove()` of the result.

    Does not keep it alive.
    """
    reference = weakref.ref(added)
    with _changing:
        _guards.append(reference)
        if len(_guards) == 1:
            for seam in _SEAMS:
                _undo.append(when_imported(seam.module, functools.partial(_replace, seam)))

    def remove() -> None:
        with _changing:
            if reference in _guards:
                _guards.remove(reference)
            while _undo and not _guards:
                _undo.pop()()

    return SimpleNamespace(remove=remove)


def _live() -> list[Any]:
    return [member for reference in tuple(_guards) if (member := reference()) is not None]


def _replace(seam: Seam) -> None:
    try:
        *owners, name = seam.name.split(".")
        owner: Any = sys.modules[seam.module]
        for part in owners:
            owner = getattr(owner, part)
        original = vars(owner)[name]
        function = _guarded(seam, original) if seam.called else _removing(original)
        with _changing:
            if _guards:
                _undo.append(functools.partial(_swap, owner, function, original))
                _swap(owner, original, function)
    except Exception:  # another version of the library
        suppressed(f"{seam.module}.{seam.name} could not be guarded")


def _swap(owner: Any, old: Any, new: Any) -> None:
    """Replace a function in its class, or in every module that has it, under whatever name."""
    modules = [module for module in [*sys.modules.values()] if issubclass(type(module), ModuleType)]
    for place in [owner] if isinstance(owner, type) else modules:
        # Any other way to ask a module of importlib's LazyLoader for its names would run it.
        for name, value in [*object.__getattribute__(place, "__dict__").items()]:
            if value is old:
                setattr(place, name, new)


def _guarded(seam: Seam, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        guards, bound = [] if _is_saving.get() else _live(), None
        if guards:
            with suppress(TypeError):  # the function itself says what is wrong
                bound = signature.bind(*args, **kwargs)
        if bound is None or (call := Save(seam, bound, original)).is_left_alone:
            return original(*args, **kwargs)
        for member in guards:
            if faults := member.examine(call):
                return member.divert(call, faults)
        try:
            result = call.write()
        except BaseException as error:
            if not is_refusal(error):
                raise
            return guards[0].refused(call, error)
        for member in guards:
            member.wrote(call)
        return result

    return save


def _removing(original: Any) -> Any:
    @functools.wraps(original)
    def remove(*args: Any, **kwargs: Any) -> Any:
        return None if any(member.keeps for member in _live()) else original(*args, **kwargs)

    return remove
