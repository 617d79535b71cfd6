"""A capsule: a folder with all that is needed to run one module call again, on another machine and later.

Its file `call.pt` is a dict of plain containers and tensors, written by `torch.save`: inputs, weights, buffers and
random states bit for bit, what was called and how, and the finding (see docs/capsules.md). It is read with
`weights_only=True`, so to open a capsule runs none of its writer's code.

Tensors, None, bool, int, float, str, torch.dtype, torch.device and torch.Size stay as they are, and so do lists, tuples
and dicts of them. A subclass of one of them is stored as its base. Anything else is left out, and
{"nanwatch": "left out", "why": …} takes its place.
"""

from __future__ import annotations

import inspect
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import count
from pathlib import Path
from pickle import UnpicklingError
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

from ..instrumentation.execution_context import Autocast, RngState
from ..numerics import _extension
from ..numerics.readable import dtype_name, is_plain, only_our_dispatch, type_name, unreadable
from ..recording.walk import spell_key
from ..records.fields import body_of
from ..report.finding import Finding
from ..report.report import Report
from ..util.messages import module_name, spell, visible

FILE = "call.pt"
MAX_BYTES = 1 << 30
MARK = "nanwatch"
_SCHEMA, _VERSION = "nanwatch.capsule", 3
_MAX_DEPTH = 32  # the depth that a watch walks
_PLAIN = (type(None), bool, torch.dtype, torch.device, torch.Size)
# The pickle of an instance of a subclass would name its class.
_BASES: dict[type, Callable[[Any], Any]] = {int: int.__index__, float: float.__float__, str: str.__str__}


class CapsuleError(ValueError):
    """The folder is no capsule of this version. The text names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Capsule:
    """One module call, read from `folder`.

    `module` is the qualified name in the watched model, "" for the root, `class_name` its class's. `device` is where
    it ran, such as "cuda:0". `args` and `kwargs` hold tensors on the CPU. `state` has the weights and buffers of the
    module and its submodules by name, tied ones as one tensor, and `training` the flag of the module ("") and of each
    submodule where it differs. `rng` and `autocast` are as the call found them. `left_out` lists all that is missing,
    with the reason; a dict with the key "nanwatch" takes its place.

    Examples:
        >>> import nanwatch, torch
        >>> folder = nanwatch.write_capsule("call", torch.nn.Linear(2, 2), "decoder.head", [torch.ones(1, 2)])
        >>> capsule = nanwatch.Capsule.open(folder)
        >>> capsule
        <Capsule of a call of decoder.head (Linear)>
        >>> capsule.module, sorted(capsule.state), capsule.args
        ('decoder.head', ['bias', 'weight'], (tensor([[1., 1.]]),))
    """

    folder: Path
    module: str
    class_name: str
    device: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: Mapping[str, Any]
    training: Mapping[str, bool]
    rng: RngState
    autocast: tuple[Autocast, ...]
    finding: Finding | None
    rank: int
    versions: Mapping[str, str | None]
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return visible(f"<Capsule of a call of {module_name(self.module)} ({self.class_name})>")

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Capsule:
        """Read the capsule in `folder`, which may also name its file, all of it into memory.

        Raises CapsuleError, which names the file and what is wrong, for anything that is no capsule.
        """
        path = Path(folder) if os.path.isfile(folder) else Path(folder) / FILE
        try:
            with path.open("rb") as file:
                if not zipfile.is_zipfile(file):
                    raise ValueError("it is damaged, or torch.save has not written it")
            with only_our_dispatch():
                document = torch.load(path, map_location="cpu", weights_only=True)
            return cls(path.parent, **_fields(document))
        except Exception as error:
            # The text of PyTorch's own advises to run the code of the file.
            why = "it holds more than plain values" if isinstance(error, UnpicklingError) else spell(error)
            advice = f"a capsule is a folder with the file {FILE}, as nanwatch wrote it"
            raise CapsuleError(visible(f"{path}: {why}; {advice}")) from error


def _fields(document: Any) -> dict[str, Any]:
    """Return the fields of a Capsule but for its folder."""
    values = body_of(document, _SCHEMA, _VERSION)
    values["rng"] = RngState(values["rng"][0], tuple(values["rng"][1:]))
    values["autocast"] = tuple(Autocast(*state) for state in values["autocast"])
    values["left_out"] = tuple(values["left_out"])
    values["finding"] = Report.from_json(values["finding"]).finding
    return {field.name: values[field.name] for field in fields(Capsule)[1:]}


def write_capsule(
    folder: str | os.PathLike[str],
    module: nn.Module,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    finding: Finding | None = None,
    rank: int = 0,
    rng: RngState | None = None,
    autocast: Sequence[Autocast] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Write the call `module(*args, **kwargs)` as a capsule and return its folder, which appears whole or not at all.

    Args:
        folder: the folder to make; when there is one of this name, a number is appended: `folder.2`.
        module: the module, with its weights, buffers and training flags as they are now.
        name: its qualified name in the watched model.
        args, kwargs: its arguments as they are now. Inputs that the call changed in place are written changed.
        finding: the Finding of the call, if any.
        rank: of the process.
        rng, autocast: the random states and the autocast states as the call found them; None for those of now.
        max_bytes: the most that tensors may take. What does not fit is left out: inputs go in first, then weights and
            buffers, the smallest first. The random states (5 kB, and 16 bytes for each GPU) come on top.

    Waits for the tensors' devices, and takes up to `max_bytes` of memory to copy tensors to the CPU. Raises OSError
    when the folder cannot be written.

    Examples:
        >>> import nanwatch, torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> folder = nanwatch.write_capsule("call", layer, "decoder.head", [torch.ones(1, 2)])
        >>> nanwatch.replay(folder, torch.nn.Linear(2, 2)).finding is None
        True
    """
    rng, autocast = rng or RngState.capture(), Autocast.capture() if autocast is None else autocast
    flags = {path: submodule.training for path, submodule in module.named_modules()}
    with only_our_dispatch(), torch.no_grad():
        contents = _Contents(max_bytes)
        document = {
            "args": contents.encoded(tuple(args), "input"),
            "kwargs": {key: contents.encoded(x, f"input[{key}]") for key, x in (kwargs or {}).items()},
            "state": contents.encoded_state(module),
            "schema": _SCHEMA,
            "version": _VERSION,
            "versions": _extension.versions(),
            "module": name,
            "class_name": type(module).__name__,
            "device": contents.device,
            "training": {path: flag for path, flag in flags.items() if path == "" or flag != module.training},
            "rng": [state.cpu().clone() for state in (rng.torch, *rng.cuda)],
            "autocast": [(state.device_type, state.dtype, state.enabled) for state in autocast],
            "finding": Report((), finding, None).to_json(),
            "rank": rank,
            "left_out": list(contents.left_out),
        }
        folder = Path(folder).absolute()
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(mkdtemp(".unfinished", f".{folder.name}.", folder.parent), folder.name)
        try:
            unfinished.mkdir()  # with the permissions of any folder
            inspect.unwrap(torch.save)(document, unfinished / FILE)  # past all guards of checkpoints
            return make_numbered(folder, unfinished.rename)
        finally:
            shutil.rmtree(unfinished.parent, ignore_errors=True)


class _Contents:
    """Values of a call as plain containers, with copies of the tensors that fit into `max_bytes`.

    Each tensor is stored once. Two views of the same memory are two. `device` is that of the first weight or buffer
    that is kept, else of the first input. `left_out` has what is missing, with the reason.
    """

    def __init__(self, max_bytes: int) -> None:
        self.device = "cpu"
        self.left_out: dict[str, None] = {}
        self._max_bytes = self._room = max_bytes
        # Each tensor with its copy, by id, which is unique while the tensor is kept here.
        self._copies: dict[int, tuple[Tensor, Any]] = {}

    def encoded_state(self, module: nn.Module) -> dict[str, Any]:
        state: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        state |= module.named_buffers(remove_duplicate=False)
        for key in sorted(state, key=lambda key: state[key].numel() * state[key].element_size()):
            self.encoded(state[key], f"state[{key}]")
        encoded = {key: self.encoded(x, f"state[{key}]") for key, x in state.items()}
        kept = [x for key, x in state.items() if isinstance(encoded[key], Tensor)]
        kept = kept or [x for x, copied in self._copies.values() if isinstance(copied, Tensor)]
        self.device = str(kept[0].device) if kept else "cpu"
        return encoded

    def encoded(self, value: Any, label: str, inside: tuple[int, ...] = ()) -> Any:
        """Return a value as plain containers, with parts labelled as in a record. Never raises for a value."""
        if isinstance(value, Tensor):
            if id(value) not in self._copies:
                self._copies[id(value)] = value, self._copied(value, label)
            return self._copies[id(value)][1]
        if isinstance(value, _PLAIN):
            return value
        for kind, convert in _BASES.items():
            if isinstance(value, kind):
                return convert(value)
        try:
            if len(inside) > _MAX_DEPTH or id(value) in inside:
                raise TypeError(f"contains itself, or is nested deeper than {_MAX_DEPTH}")
            return self._container(value, label, (*inside, id(value)))
        except Exception as error:  # a container of the user's own may do anything when asked for its items
            return self._leave_out(f"{label} ({type_name(value)}): {spell(error)}")

    def _leave_out(self, text: str) -> dict[str, str]:
        self.left_out[visible(text)] = None
        return {MARK: "left out", "why": visible(text)}

    def _copied(self, x: Tensor, label: str) -> Any:
        """Return a copy of a tensor, or what takes the place of one that is left out."""
        what = f"{label} ({type_name(x)}, {dtype_name(x.dtype)} {list(x.shape)}"
        scattered = "" if is_plain(x) else "its values do not lie in one block of plain memory"
        if reason := unreadable(x) or scattered:
            return self._leave_out(f"{what}): {reason}")
        size = x.numel() * x.element_size()
        if size > self._room:
            reason = f"the tensors of this capsule may take {self._max_bytes:,} bytes (max_bytes)"
            return self._leave_out(f"{what}, {size:,} bytes): {reason}")
        self._room -= size
        # In memory of its own, with the same strides where the elements leave no gaps.
        plain = x.detach().resolve_conj().resolve_neg().to("cpu", copy=True)
        return plain.requires_grad_(x.requires_grad)

    def _container(self, value: Any, label: str, inside: tuple[int, ...]) -> Any:
        def part(name: object, item: Any) -> Any:
            return self.encoded(item, f"{label}[{name}]", inside)

        if hasattr(value, "_fields") or is_dataclass(value) or not isinstance(value, tuple | list | Mapping):
            raise TypeError("a capsule holds tensors, plain values, and lists, tuples and dicts of them")
        if isinstance(value, tuple | list):
            items = [part(number, item) for number, item in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        if MARK in value or not all(map(_is_key, value)):
            raise TypeError(f"it has keys that are no plain values, or {MARK!r}")
        return {part("key", key): part(spell_key(key), value[key]) for key in value}


def _is_key(key: Any) -> bool:
    return all(map(_is_key, key)) if type(key) is tuple else isinstance(key, str | int | float | None)


def make_numbered(folder: Path, make: Callable[[Path], object]) -> Path:
    """Call `make` with the first of `folder`, `folder.2`, `folder.3`, ... that does not exist. Return that path.

    `make` raises OSError when it finds the place taken after all. Raises what `make` raises for another reason.
    """
    place, numbers = folder, count(2)
    while True:
        try:
            if not os.path.lexists(place):
                make(place)
                return place
        except OSError:
            if not os.path.lexists(place):  # else another process made one of this name in the meantime
                raise
        place = folder.with_name(f"{folder.name}.{next(numbers)}")
