"""Functions that write checkpoints: while a guard is there, each of their calls goes through it.

The lowest public function of a format is replaced where it is looked up, so that `save_pretrained`, Trainer, Lightning
and accelerate are covered by it, also where they imported `safetensors.torch.save_file` before. Modules that are
imported later are changed then.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import inspect
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed

from ..numerics.formats import SAFETENSORS
from ..util.imports import when_imported
from ..util.visible import suppressed


class Seam(NamedTuple):
    """Function or method that saves checkpoints, and its arguments for the content and the place."""

    module: str
    name: str
    called: str = ""  # in words; "" for one that deletes a checkpoint that has a successor
    content: str = ""
    place: str = ""
    again: tuple[str, ...] = ()  # other modules with the same function under the same name
    is_folder: bool = False


_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_LIGHTNING = ("lightning.fabric.plugins.io.torch_io", "lightning_fabric.plugins.io.torch_io")
_SEAMS = (
    Seam("torch.serialization", "save", "torch.save", "obj", "f", ("torch",)),
    Seam("safetensors.torch", "serialize_file", "safetensors", "tensor_dict", "filename"),
    # By itself, because it makes another error of each ValueError.
    Seam("safetensors.torch", "save_model", "safetensors", "model", "filename"),
    # `async_save` calls it too, in a thread.
    Seam(_SAVER, "save", "torch.distributed.checkpoint.save", "state_dict", "checkpoint_id",
         ("torch.distributed.checkpoint",), is_folder=True),
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
    """One call that saves: its content, its place, and how to go on."""

    def __init__(self, seam: Seam, bound: inspect.BoundArguments, original: Callable[..., Any]) -> None:
        self._seam = seam
        self._bound = bound
        self._original = original
        self.function = seam.called
        place = bound.arguments.get(seam.place)
        if place is None:
            place = getattr(bound.arguments.get("storage_writer"), "path", None)
        # None for an open file and for a storage of the user's own.
        self.path = os.fsdecode(place) if isinstance(place, str | os.PathLike) else None

    @property
    def content(self) -> Any:
        """Object to save: nested containers of tensors, or a model."""
        content = self._bound.arguments.get(self._seam.content)
        if self._seam.name == "serialize_file" and isinstance(content, dict):
            return {name: _tensor_of(spec) for name, spec in content.items()}
        return self._bound.arguments.get("self") if content is None else content

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
        if self._seam.module != _SAVER or is_alone or not is_job:
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
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        def refuse(*_: Any, **__: Any) -> None:
            raise CheckpointRefusedError(reason)

        planner: Any = DefaultSavePlanner()
        planner.set_up_planner = refuse
        try:  # the other ranks wait, and only an error of the save itself reaches them
            self.write(planner=planner)
        except BaseException as error:  # CheckpointException is no Exception
            if _is_refusal(error):
                return error
            raise
        raise AssertionError("a save without a plan has ended")


def _tensor_of(spec: Any) -> torch.Tensor | None:
    """Return a view of the memory that safetensors is to write: an address, or in older versions bytes."""
    if isinstance(spec, dict):
        name, shape = spec["dtype"], tuple(spec["shape"])
        address, size = np.frombuffer(spec["data"], np.uint8).ctypes.data, len(spec["data"])
    else:
        name, shape, address, size = spec.dtype, tuple(spec.shape), spec.data_ptr, spec.data_len
    dtype: torch.dtype | None = getattr(torch, SAFETENSORS.get(name, name), None)
    if not size or dtype is None or not (dtype.is_floating_point or dtype.is_complex):
        return None  # an integer is always finite
    flat = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)
    return flat.view(shape) if flat.numel() == math.prod(shape) else flat


class CheckpointRefusedError(RuntimeError):
    """The reason why a rank has no part in a checkpoint."""


def _is_refusal(error: BaseException) -> bool:
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
                if (waiting := when_imported(seam.module, functools.partial(_replace, seam))) is not None:
                    _undo.append(waiting.cancel)

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
        places = [sys.modules[module] for module in (seam.module, *seam.again) if module in sys.modules]
        for owner in owners:
            places = [getattr(place, owner) for place in places]
        original = vars(places[0])[name]
        function = _guarded(seam, original) if seam.called else _removing(original)
        with _changing:
            for place in places if _guards else ():
                if vars(place).get(name) is original:
                    setattr(place, name, function)
                    _undo.append(functools.partial(_put_back, place, name, function, original))
    except Exception:  # another version of the library
        suppressed(f"{seam.module}.{seam.name} could not be guarded")


def _put_back(place: Any, name: str, function: Any, original: Any) -> None:
    # Another library may have put its own function over this one, which then stays and guards nothing.
    if vars(place).get(name) is function:
        setattr(place, name, original)


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
            if not _is_refusal(error):
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
