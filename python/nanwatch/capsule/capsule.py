"""A capsule: a folder with all that is needed to run one module call again, on another machine and later.

Its file `call.pt` is a dict of plain containers and tensors, written by `torch.save`: inputs, weights, buffers and
random states bit for bit, what was called and how, and the finding (see docs/capsules.md). It is read with
`weights_only=True`, so to open a capsule runs none of its writer's code.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..instrumentation.execution_context import Autocast, RngState
from ..numerics import _extension
from ..numerics.readable import only_our_dispatch, type_name, unreadable
from ..report.finding import Finding
from ..report.report import Report, report_of
from ..util import reading
from ..util.visible import module_name, visible
from .values import Encoder, LeftOut, decode

FILE = "call.pt"
MAX_BYTES = 1 << 30
_SCHEMA, _VERSION = "nanwatch.capsule", 1
_UNKNOWN_TO_LOAD = re.compile(r"torch\.u?int[1-7]")


class CapsuleError(ValueError):
    """The folder is no capsule of this version. The text names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Capsule:
    """One module call, read from `folder`.

    `module` is the qualified name in the watched model, "" for the root, `class_name` its class's. `device` is where
    it ran, such as "cuda:0". `args` and `kwargs` hold tensors on the CPU; a dataclass, ModelOutput or named tuple is a
    Structure, what was left out a LeftOut. `state` has the weights and buffers of the module and its submodules by
    name, tied ones as one tensor, and `training` the flag of the module ("") and of each submodule where it differs.
    `rng` and `autocast` are as the call found them. `left_out` lists all that is missing.

    Examples:
        >>> import nanwatch, torch
        >>> folder = nanwatch.write_capsule("call", torch.nn.Linear(2, 2), "decoder.head", [torch.ones(1, 2)])
        >>> capsule = nanwatch.Capsule.open(folder)
        >>> capsule
        <Capsule of a call of decoder.head (Linear), 1 argument and 2 tensors of state: call>
        >>> capsule.module, sorted(capsule.state), capsule.args
        ('decoder.head', ['bias', 'weight'], (tensor([[1., 1.]]),))
    """

    folder: Path
    module: str
    class_name: str
    device: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: Mapping[str, Tensor | LeftOut]
    training: Mapping[str, bool]
    rng: RngState
    autocast: tuple[Autocast, ...]
    finding: Finding | None
    rank: int
    versions: Mapping[str, str | None]
    left_out: tuple[LeftOut, ...] = field(default=())

    def __repr__(self) -> str:
        amounts = (len(self.args) + len(self.kwargs), "argument"), (len(self.state), "tensor")
        inside = " and ".join(f"{count:,} {noun}{'' if count == 1 else 's'}" for count, noun in amounts)
        name = module_name(self.module)
        return visible(
            f"<Capsule of a call of {name} ({self.class_name}), {inside} of state: {self.folder.name}>"
        )

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Capsule:
        """Read the capsule in `folder`, all of it into memory.

        Raises CapsuleError, which names the file and what is wrong, for anything that is no capsule.
        """
        path = Path(folder) / FILE
        try:
            # A pipe would wait for ever, and a link may lead anywhere.
            reading.check_regular(path, follows_links=False)
            with only_our_dispatch():
                document = torch.load(path, map_location="cpu", weights_only=True)
            return cls(Path(folder), **_fields(document))
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else _reason(error)
            advice = f"a capsule is a folder with the file {FILE}, as nanwatch wrote it"
            raise CapsuleError(visible(f"{path}: {reason}; {advice}")) from error


def _reason(error: Exception) -> str:
    if type(error) is ValueError:
        return str(error)
    if isinstance(error, RecursionError):
        return "it is nested too deeply for a capsule"
    return f"torch.load(weights_only=True) cannot read it ({type(error).__name__})"


_EXPECTED: dict[str, type] = {
    **dict.fromkeys(("module", "class_name", "device", "finding"), str),
    **dict.fromkeys(("kwargs", "state", "training", "versions"), dict),
    **dict.fromkeys(("rng", "autocast", "left_out"), list),
    "args": tuple,
    "rank": int,
}


def _fields(document: Any) -> dict[str, Any]:
    """Return the fields of a Capsule but for its folder. Raise ValueError for what a stranger may have put there."""
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        raise ValueError("it has no call of a module in it")
    if document.get("version") != _VERSION:
        raise ValueError(
            f"its version is {document.get('version')!r}, this nanwatch reads version {_VERSION}"
        )
    done: dict[int, tuple[Any, Any]] = {}
    values: dict[str, Any] = {}
    for name, kind in _EXPECTED.items():
        value: Any = document.get(name)
        if type(value) is not kind:
            raise ValueError(f"it has no {name!r}, or another type of it")
        # Names may be any, so these dicts have no marks.
        if isinstance(value, dict):
            values[name] = {key: decode(x, done) for key, x in value.items()}
        else:
            values[name] = decode(value, done)
    torch.Generator().set_state(values["rng"][0])  # raises where torch has no such state
    values["rng"] = RngState(values["rng"][0], tuple(values["rng"][1:]))
    values["device"] = str(torch.device(values["device"]))
    values["autocast"] = tuple(Autocast(*state) for state in values["autocast"])
    values["left_out"] = tuple(values["left_out"])
    values["finding"] = Report.from_json(values["finding"]).finding
    return values


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
        max_bytes: the most that tensors may take. Beyond it weights and buffers are left out, the largest first, then
            inputs; the random states (5 kB, and 16 bytes for each GPU) come on top.

    Waits for the tensors' devices, and takes up to `max_bytes` of memory to copy tensors to the CPU. Raises OSError
    when the folder cannot be written.

    Examples:
        >>> import nanwatch, torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> folder = nanwatch.write_capsule("call", layer, "decoder.head", [torch.ones(1, 2)])
        >>> nanwatch.replay(folder, torch.nn.Linear(2, 2)).finding is None
        True
    """
    tensors = _Tensors()
    encoder = Encoder(tensors.note)
    with torch._C.DisableTorchFunction():
        named = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
    state = {key: tensors.note(x, f"state[{key}]", is_state=True) for key, x in named}
    written_args = tuple(encoder.encode(x, f"input[{i}]") for i, x in enumerate(args))
    written_kwargs = {key: encoder.encode(x, f"input[{key}]") for key, x in (kwargs or {}).items()}
    tensors.limit(max_bytes)
    rng = RngState.capture() if rng is None else rng
    flags = {path: submodule.training for path, submodule in module.named_modules()}
    with only_our_dispatch(), torch.no_grad():
        document = {
            "schema": _SCHEMA,
            "version": _VERSION,
            "versions": _extension.versions(),
            "module": name,
            "class_name": type(module).__name__,
            "device": tensors.device,
            "args": tensors.fill(written_args),
            "kwargs": tensors.fill(written_kwargs),
            "state": tensors.fill(state),
            "training": {path: flag for path, flag in flags.items() if path == "" or flag != module.training},
            "rng": [state.cpu().clone() for state in (rng.torch, *rng.cuda)],
            "autocast": [
                (each.device_type, each.dtype, each.enabled)
                for each in (Autocast.capture() if autocast is None else autocast)
            ],
            "finding": report_of((), finding).to_json(),
            "rank": rank,
            "left_out": [missing.encoded() for missing in (*tensors.left_out, *encoder.left_out)],
        }
        return _write_folder(Path(folder).absolute(), document)


class _Tensors:
    """Tensors of a call, each object once. Two views of the same memory are two."""

    def __init__(self) -> None:
        self._noted: dict[
            int, tuple[Tensor, str, bool]
        ] = {}  # by id, which is unique while the tensor is kept here
        self._missing: dict[int, LeftOut] = {}
        self._copies: dict[int, Tensor] = {}

    def note(self, x: Tensor, label: str, *, is_state: bool = False) -> Tensor:
        """Note a tensor, and return it, to stand in the tree until it is known which tensors fit."""
        if id(x) not in self._noted:
            self._noted[id(x)] = x, label, is_state
            if reason := _why_not(x):
                self._missing[id(x)] = LeftOut(label, type_name(x), None, reason)
        return x

    def limit(self, max_bytes: int) -> None:
        """Drop what is beyond the limit: of the state, then of the inputs, the largest first."""
        with torch._C.DisableTorchFunction():
            kept = [noted for key, noted in self._noted.items() if key not in self._missing]
            sizes = [(is_state, x.numel() * x.element_size(), label, x) for x, label, is_state in kept]
            total = sum(size for _, size, *_ in sizes)
            for _, size, label, x in sorted(sizes, key=lambda item: (not item[0], -item[1])):
                if total > max_bytes and size:
                    total -= size
                    kind = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
                    why = f"the tensors of this capsule may take {max_bytes:,} bytes (max_bytes)"
                    self._missing[id(x)] = LeftOut(label, kind, size, why)

    @property
    def left_out(self) -> list[LeftOut]:
        """The tensors that are not kept, in the order in which they were left out."""
        return list(self._missing.values())

    @property
    def device(self) -> str:
        """The device of the call, judged by its first weight that is kept, or else by its first input."""
        return next(
            (str(x.device) for key, (x, *_) in self._noted.items() if key not in self._missing), "cpu"
        )

    def fill(self, tree: Any) -> Any:
        """Return a tree with a copy of each tensor, or the reason for none, in its place."""
        if isinstance(tree, Tensor):
            if missing := self._missing.get(id(tree)):
                return missing.encoded()
            if id(tree) not in self._copies:
                self._copies[id(tree)] = _copied(tree)
            return self._copies[id(tree)]
        if isinstance(tree, dict):
            return {key: self.fill(item) for key, item in tree.items()}
        return type(tree)(map(self.fill, tree)) if type(tree) in (list, tuple) else tree


def _why_not(x: Tensor) -> str:
    """Return why the values of `x` cannot be kept, in a few words; "" when they can."""
    reason = unreadable(x)
    if reason and not reason.startswith("dtype "):
        return reason
    with torch._C.DisableTorchFunction():
        if type(x) is not Tensor and type(x).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            return "a subclass whose values only its own code knows"
        if _UNKNOWN_TO_LOAD.fullmatch(str(x.dtype)):
            return f"torch.load does not know {x.dtype}"
        if x.layout is not torch.strided or x.is_nested or x.is_quantized:
            return f"its values do not lie in one block of memory ({'nested' if x.is_nested else x.layout})"
    return ""


def _copied(x: Tensor) -> Tensor:
    """Return a copy on the CPU in memory of its own, with the same strides where the elements leave no gaps."""
    plain = x.detach().resolve_conj().resolve_neg()
    plain = plain.clone() if plain._is_zerotensor() else plain.to("cpu", copy=True)
    return plain.cpu().requires_grad_(x.requires_grad)


def _write_folder(folder: Path, document: dict[str, Any]) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.unfinished")
    unfinished.mkdir()
    try:
        inspect.unwrap(torch.save)(document, unfinished / FILE)  # past all guards of checkpoints
        return make_numbered(folder, unfinished.rename)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


_MAX_FOLDERS = 10_000


def make_numbered(folder: Path, make: Callable[[Path], object]) -> Path:
    """Call `make` with the first of `folder`, `folder.2`, `folder.3`, ... that does not exist. Return that path.

    `make` raises OSError when it finds the place taken after all. Raises what `make` raises for another reason, and
    FileExistsError after 9,999 names.
    """
    for number in range(1, _MAX_FOLDERS):
        place = folder if number == 1 else folder.with_name(f"{folder.name}.{number}")
        if os.path.lexists(place):
            continue
        try:
            make(place)
        except OSError:
            # Another process made one of this name in the meantime; any other error comes again.
            if not os.path.lexists(place):
                raise
            continue
        return place
    raise FileExistsError(f"{folder} and {_MAX_FOLDERS - 2:,} more like it exist; delete some")
