"""Functions that write checkpoints: while a guard is there, each of their calls goes through it.

The lowest public function of a format is replaced where it is looked up, so that `save_pretrained`, Trainer, Lightning
and accelerate are covered by it, also where they imported `safetensors.torch.save_file` before. A replaced function
calls the one that it replaces, and hands it its own arguments. Modules that are imported later are changed then.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import inspect
import io
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed

from ..numerics.formats import SAFETENSORS
from ..util.imports import WhenImported, when_imported
from ..util.visible import suppressed


class Seam(NamedTuple):
    """Function or method that saves or deletes checkpoints, and its arguments for what and where."""

    module: str
    name: str
    called: str = ""  # in words
    content: str = ""
    place: str = ""
    again: tuple[str, ...] = ()  # other modules with the same function under the same name
    is_folder: bool = False


_DCP = "torch.distributed.checkpoint"
_SAVER = f"{_DCP}.state_dict_saver"
_LIGHTNING = ("lightning.fabric.plugins.io.torch_io", "lightning_fabric.plugins.io.torch_io")
SAVES = (
    Seam("torch.serialization", "save", "torch.save", "obj", "f", ("torch",)),
    Seam("safetensors.torch", "serialize_file", "safetensors", "tensor_dict", "filename"),
    # By itself, because it makes another error of each ValueError.
    Seam("safetensors.torch", "save_model", "safetensors", "model", "filename"),
    *(
        Seam(_SAVER, name, f"{_DCP}.{name}", "state_dict", "checkpoint_id", (_DCP,), is_folder=True)
        for name in ("save", "async_save")
    ),
    # Whole, because a model of several files is one checkpoint, and the files of the one before are deleted first.
    Seam(
        "transformers.modeling_utils",
        "PreTrainedModel.save_pretrained",
        "save_pretrained",
        "state_dict",
        "save_directory",
        is_folder=True,
    ),
    # Whole, because it saves into memory and then replaces the file.
    *(
        Seam(module, "TorchCheckpointIO.save_checkpoint", "Lightning", "checkpoint", "path")
        for module in _LIGHTNING
    ),
)
# What deletes checkpoints that have had their successor.
REMOVALS = (
    Seam("transformers.trainer", "rotate_checkpoints"),
    *(Seam(module, "TorchCheckpointIO.remove_checkpoint") for module in _LIGHTNING),
)


class Save:
    """One call that saves: what, where, and how to go on."""

    def __init__(self, seam: Seam, bound: inspect.BoundArguments, proceed: Callable[..., Any]) -> None:
        self._seam = seam
        self._bound = bound
        self._proceed = proceed
        self.owners: Mapping[tuple[int, int, torch.dtype], torch.Tensor] = {}
        """Tensors by address, bytes and dtype that `content` has in place of views of the same memory."""

    @property
    def function(self) -> str:
        """Who saves, in words."""
        return self._seam.called

    @property
    def content(self) -> Any:
        """Object to save: nested containers of tensors, or a model."""
        arguments = self._bound.arguments
        found = arguments.get(self._seam.content)
        if self.is_raw and isinstance(found, dict):
            return {name: _tensor_of(spec, self.owners) for name, spec in found.items()}
        return arguments.get("self") if found is None else found

    @property
    def is_raw(self) -> bool:
        """True if it is given as memory, without the tensors that own it."""
        return self._seam.name == "serialize_file"

    @property
    def path(self) -> str | None:
        """Where it goes; None for an open file and for a storage of the user's own."""
        place = self._bound.arguments.get(self._seam.place)
        if place is None:
            place = getattr(self._bound.arguments.get("storage_writer"), "path", None)
        return os.fsdecode(place) if isinstance(place, str | os.PathLike) else None

    @property
    def open_path(self) -> str | None:
        """The path of the open file that it goes to, if it has one."""
        file = self._bound.arguments.get(self._seam.place)
        name = getattr(file, "name", None) if isinstance(file, io.BufferedIOBase | io.RawIOBase) else None
        return name if isinstance(name, str) and os.path.exists(name) else None

    @property
    def is_deferred(self) -> bool:
        """True if a thread calls `save` with a copy of the content soon, and other ranks wait for it to fail there."""
        kind = self._bound.arguments.get("async_checkpointer_type")
        return (
            self._seam.name == "async_save"
            and self.num_ranks > 1
            and getattr(kind, "value", "thread") == "thread"
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks that save the same checkpoint, and fail or succeed together."""
        arguments, distributed = self._bound.arguments, torch.distributed
        if (
            self._seam.module != _SAVER
            or arguments.get("no_dist")
            or not arguments.get("use_collectives", True)
        ):
            return 1
        is_job = distributed.is_available() and distributed.is_initialized()
        return distributed.get_world_size(arguments.get("process_group")) if is_job else 1

    def beside(self, path: str) -> str:
        """Return the name beside `path` for a checkpoint that is not to replace the one there."""
        stem, ending = (path.rstrip("/"), "") if self._seam.is_folder else os.path.splitext(path)
        return f"{stem}{_MARK}{ending}"

    @property
    def is_beside(self) -> bool:
        """True if it goes to such a name already."""
        return _MARK in os.path.basename((self.path or "").rstrip("/"))

    def evaluate(self) -> None:
        """Ask objects in the content for their state once, as DCP does: an asynchronous save then has the same."""
        if self._seam.module == _SAVER and isinstance(self.content, dict):
            stateful = sys.modules["torch.distributed.checkpoint.stateful"].Stateful
            self._bound.arguments[self._seam.content] = {
                key: value.state_dict() if isinstance(value, stateful) else value
                for key, value in self.content.items()
            }

    def write(self) -> Any:
        """Save as asked, and return what the function returns."""
        return self._proceed(*self._bound.args, **self._bound.kwargs)

    def write_to(self, path: str, *, now: bool = False) -> Any:
        """Save to another path, past all guards. `now`: return only when it is written."""
        bound = copy.copy(self._bound)
        bound.arguments = {**bound.arguments, self._seam.place: path}
        if (writer := bound.arguments.get("storage_writer")) is not None:
            # It would remember the path.
            bound.arguments["storage_writer"] = copy.copy(writer)
        with unguarded():
            found = self._proceed(*bound.args, **bound.kwargs)
            if now and self._seam.name == "async_save":
                getattr(found, "upload_completion", found).result()
        return found

    def fail_on_all_ranks(self, reason: str) -> Any:
        """Let the save fail before anything is written, with this reason on every rank that takes part."""
        bound = copy.copy(self._bound)
        bound.arguments = {**bound.arguments, "planner": _refusing_planner(reason)}
        with unguarded():
            return self._proceed(*bound.args, **bound.kwargs)


def _tensor_of(spec: Any, owners: Mapping[tuple[int, int, torch.dtype], torch.Tensor]) -> torch.Tensor | None:
    """Return the owner or a view of the memory that safetensors is to write: an address, or in older versions bytes."""
    is_bytes = isinstance(spec, dict)
    name = spec["dtype"] if is_bytes else spec.dtype
    dtype: torch.dtype | None = getattr(torch, SAFETENSORS.get(name, name), None)
    address, size = (
        (np.frombuffer(spec["data"], np.uint8).ctypes.data, len(spec["data"]))
        if is_bytes
        else (spec.data_ptr, spec.data_len)
    )
    if not size or dtype is None or not (dtype.is_floating_point or dtype.is_complex):
        return None  # an integer is always finite
    if (owner := owners.get((address, size, dtype))) is not None:
        return owner
    flat = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)
    shape = tuple(spec["shape"] if is_bytes else spec.shape)
    return flat.view(shape) if flat.numel() == math.prod(shape) else flat


_MARK = ".nonfinite"


class CheckpointRefusedError(RuntimeError):
    """The reason why a rank has no part in a checkpoint."""


def is_refusal(error: BaseException) -> bool:
    """Return whether a rank has refused to save, which is why all ranks have failed to."""
    failures = getattr(error, "failures", None)
    told = failures.values() if isinstance(failures, dict) else ()
    return any(isinstance(one[0], CheckpointRefusedError) for one in told)


def _refusing_planner(reason: str) -> Any:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner()
    planner.set_up_planner = functools.partial(_refuse, reason)  # type: ignore[method-assign]
    return planner


def _refuse(reason: str, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
    raise CheckpointRefusedError(reason)


@dataclass(frozen=True)
class Guard:
    """Guard of saves: `save` is called in place of each, and a removal is left out while `keeps` says so."""

    save: Callable[[Save], Any]
    keeps: Callable[[], bool]


_changing = threading.RLock()  # reentrant: the garbage collector may remove a guard anywhere
_guards: list[Guard] = []
_waiting: list[WhenImported] = []
_replaced: list[tuple[list[Any], str, Any, Any]] = []  # places, name, what is there, what was there
_local = threading.local()


@contextmanager
def unguarded() -> Iterator[None]:
    """Let this thread save past all guards, as a report's capsule is."""
    before = getattr(_local, "is_unguarded", False)
    _local.is_unguarded = True
    try:
        yield
    finally:
        _local.is_unguarded = before


def guard(save: Callable[[Save], Any], keeps: Callable[[], bool]) -> SimpleNamespace:
    """Hand each save to `save`, in any thread, until `remove()` of what is returned.

    `save` calls `write` of the Save that it gets, and returns what that does. Several guards are called in turn.
    """
    one = Guard(save, keeps)
    with _changing:
        _guards.append(one)
        if len(_guards) == 1:
            for seam in (*SAVES, *REMOVALS):
                waiting = when_imported(seam.module, functools.partial(_replace, seam))
                if waiting is not None:
                    _waiting.append(waiting)

    def remove() -> None:
        with _changing:
            if one in _guards:
                _guards.remove(one)
                if not _guards:
                    _put_back()

    return SimpleNamespace(remove=remove)


def _replace(seam: Seam) -> None:
    try:
        *owners, name = seam.name.split(".")
        places = [sys.modules[module] for module in (seam.module, *seam.again) if module in sys.modules]
        for owner in owners:
            places = [getattr(place, owner) for place in places]
        original = vars(places[0])[name]
        function = _guarded(seam, original) if seam.content else _removing(original)
        with _changing:
            if not _guards:
                return
            for place in places:
                if vars(place).get(name) is original:
                    setattr(place, name, function)
            _replaced.append((places, name, function, original))
    except Exception:  # another version of the library
        suppressed(f"{seam.module}.{seam.name} could not be guarded")


def _put_back() -> None:
    for waiting in _waiting:
        waiting.cancel()
    for places, name, function, original in _replaced:
        for place in places:
            # Another library may have put its own function over this one, which then stays and guards nothing.
            if vars(place).get(name) is function:
                setattr(place, name, original)
    _waiting.clear()
    _replaced.clear()


def _guarded(seam: Seam, original: Any) -> Any:
    signature = inspect.signature(original)

    def hand_on(guards: Sequence[Guard], *args: Any, **kwargs: Any) -> Any:
        """Call the first of the guards, whose `write` calls the next one, and the last one's the function."""
        try:
            bound = signature.bind(*args, **kwargs) if guards else None
        except TypeError:  # the function itself says what is wrong
            bound = None
        if bound is None or getattr(_local, "is_unguarded", False):
            return original(*args, **kwargs)
        return guards[0].save(Save(seam, bound, functools.partial(hand_on, guards[1:])))

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        return hand_on(tuple(_guards), *args, **kwargs)

    return save


def _removing(original: Any) -> Any:
    @functools.wraps(original)
    def remove(*args: Any, **kwargs: Any) -> Any:
        return None if any(one.keeps() for one in tuple(_guards)) else original(*args, **kwargs)

    return remove
