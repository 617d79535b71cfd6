"""A capsule: a folder with all that is needed to run one module call again, on another machine and later.

    capsule.json          what was called, with what, in which situation (see docs/capsules.md), and the finding
    tensors.safetensors   inputs, weights, buffers and random states, bit for bit

There is no pickle in it: to open a capsule runs none of its writer's code and reads no other file.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..instrumentation.execution_context import Autocast, RngState
from ..numerics import _extension
from ..numerics.readable import type_name
from ..report.finding import Finding
from ..util import reading
from ..util.visible import module_name, visible
from . import files, tree
from .files import DOCUMENT, MAX_DOCUMENT, SCHEMA, TENSORS, VERSION, Document, Entry, blaming
from .tree import Json, LeftOut

MAX_BYTES = 1 << 30


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

        Raises CapsuleError, with the file and the place in it, for an invalid capsule; ImportError where safetensors is
        not installed.
        """
        place = Path(folder)
        with blaming(place / DOCUMENT):
            document = Document.read(place / DOCUMENT)
        with blaming(place / TENSORS):
            # A pipe would wait for ever, and a link may lead anywhere.
            reading.check_regular(place / TENSORS, follows_links=False)
            tensors = files.load(place / TENSORS, document.tensors, document.label)
        with blaming(place / DOCUMENT):
            return cls(place, **document.fields(tensors))


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
    when the folder cannot be written, ImportError where safetensors is not installed, ValueError when the plain values
    among the arguments are 64 MiB of text.

    Examples:
        >>> import nanwatch, torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> folder = nanwatch.write_capsule("call", layer, "decoder.head", [torch.ones(1, 2)])
        >>> nanwatch.replay(folder, torch.nn.Linear(2, 2)).finding is None
        True
    """
    call = _Entries()
    state = call.keep_state(module)
    writer = tree.Writer(call.keep_input, call.leave_out)
    written_args = [writer.write(x, f"input[{i}]") for i, x in enumerate(args)]
    written_kwargs = {key: writer.write(x, f"input[{key}]") for key, x in (kwargs or {}).items()}
    call.limit(max_bytes, state)
    rng = RngState.capture() if rng is None else rng
    random = {"cpu": call.keep("rng[cpu]", rng.torch)}
    random |= {f"cuda:{i}": call.keep(f"rng[cuda:{i}]", x) for i, x in enumerate(rng.cuda)}
    training = {path: one.training for path, one in module.named_modules()}
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "label": uuid.uuid4().hex,
        "versions": _extension.versions(),
        "module": reading.plain(files.Module(name, type(module).__name__, call.device(state))),
        "args": written_args,
        "kwargs": written_kwargs,
        "state": state,
        "training": {path: on for path, on in training.items() if path == "" or on != module.training},
        "rng": random,
        "autocast": [
            {
                "device_type": one.device_type,
                "dtype": str(one.dtype).removeprefix("torch."),
                "enabled": one.enabled,
            }
            for one in (Autocast.capture() if autocast is None else autocast)
        ],
        "finding": reading.plain(finding),
        "rank": rank,
        "tensors": {entry: reading.plain(Entry.of(x)) for entry, x in call.tensors.items()},
        "left_out": reading.plain(call.left_out),
    }
    return _write_folder(Path(folder), document, call.tensors)


class _Entries:
    """Tensors of a call under the names they have in the file, each once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.left_out: dict[str, LeftOut] = {}
        self._names: dict[object, str] = {}
        # Holds what the ids above are of, as a container may make its tensors when it is asked for them.
        self._asked: list[Tensor] = []

    def keep_state(self, module: nn.Module) -> dict[str, str]:
        """Return the entry of each weight and buffer by its name; tied ones have one."""
        with torch._C.DisableTorchFunction():
            named = [
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            ]
        return {name: self._keep_once(x, f"state[{name}]", _memory(x)) for name, x in named}

    def keep_input(self, x: Tensor, label: str) -> str:
        """Return the entry of an input. The same object given twice is one; two views of the same memory are two."""
        return self._keep_once(x, label, id(x))

    def keep(self, label: str, x: Tensor) -> str:
        """Return the entry of a tensor that can be kept."""
        name = self._unused(label)
        self.tensors[name] = x
        return name

    def leave_out(self, value: LeftOut) -> str:
        """Return the name of a value that cannot be kept."""
        name = self._unused(value.what)
        self.left_out[name] = value
        return name

    def _keep_once(self, x: Tensor, label: str, key: object) -> str:
        found = self._names.get(key)
        if found is None:
            reason = files.why_not(x)
            found = (
                self.leave_out(LeftOut(label, type_name(x), None, reason)) if reason else self.keep(label, x)
            )
            self._names[key] = found
            self._asked.append(x)
        return found

    def _unused(self, label: str) -> str:
        """Return `label`, with a number after it if it is taken: two keys of a dict may be spelt alike."""
        name, number = label, 1
        while name in self.tensors or name in self.left_out:
            number += 1
            name = f"{label} #{number}"
        return name

    def limit(self, max_bytes: int, state: Mapping[str, str]) -> None:
        """Leave out what is beyond the limit: of the state, then of the inputs, the largest first."""
        entries = {name: Entry.of(x) for name, x in self.tensors.items()}
        total = sum(entry.nbytes for entry in entries.values())
        owned = set(state.values())
        for name in sorted(entries, key=lambda name: (name not in owned, -entries[name].nbytes)):
            size = entries[name].nbytes
            if total <= max_bytes or size == 0:
                continue
            total -= size
            del self.tensors[name]
            why = f"the tensors of this capsule may take {max_bytes:,} bytes (max_bytes)"
            self.left_out[name] = LeftOut(name, entries[name].type_name, size, why)

    def device(self, state: Mapping[str, str]) -> str:
        """Return the device of the call, judged by its first weight that was kept, or else by its first input."""
        owned = [self.tensors[name] for name in state.values() if name in self.tensors]
        first = next(iter([*owned, *self.tensors.values()]), None)
        return "cpu" if first is None else str(first.device)


def _memory(x: Tensor) -> object:
    """Return a key that is equal for tensors that are the same memory seen in the same way."""
    if files.why_not(x) or x.numel() == 0:
        return id(x)
    with torch._C.DisableTorchFunction():
        return str(x.device), x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), x.is_conj(), x.is_neg()


def _write_folder(folder: Path, document: Json, tensors: Mapping[str, Tensor]) -> Path:
    folder = folder.absolute()
    spelt = json.dumps(document, allow_nan=False)
    if len(spelt) > MAX_DOCUMENT:
        raise ValueError(
            f"what is not in tensors takes {len(spelt):,} bytes as JSON, a capsule's at most {MAX_DOCUMENT:,};"
            " capture a submodule that is called with less"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.unfinished")
    unfinished.mkdir()
    try:
        text = unfinished / DOCUMENT
        text.write_text(spelt, encoding="ascii")
        files.save(unfinished / TENSORS, tensors, document["label"])
        # safetensors lets nobody else read what it writes.
        (unfinished / TENSORS).chmod(stat.S_IMODE(text.stat().st_mode))
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
