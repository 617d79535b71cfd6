"""Run of a model by a trainer or an engine, with calls, weights, tokens and settings, and its file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics._fingerprint import WIDTH
from ..numerics.ranges import fingerprint
from ..util.modules import each_module
from .calls import ModuleCall
from .differences import KeptTensor, own_tensors, sketches, weight_of
from .model_runs import most_common
from .packed import STRIDE, PackedRun, block_sizes


@dataclass
class RecordedRun:
    """Run of a model over some requests.

    `tokens` are those of each request, of which the last `sampled` are answers with these `logprobs`, as the engine
    reports them. `prints` are fingerprints of the weights by name, one for each part of a fused weight. `settings` are
    what the engine was started with and what the model's config says. `steps` has the step in which each place was
    computed, from 0.
    """

    engine: str
    dtype: torch.dtype = torch.float32
    calls: list[ModuleCall] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    prints: dict[str, list[int]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)

    def take_calls(self, run: PackedRun) -> None:
        """Take the calls of a run in steps."""
        self.calls = run.calls()
        floats = (kept.rows.dtype for one in self.calls for kept in one.outputs if not kept.is_sketch)
        self.dtype = most_common(floats, self.dtype)

    @property
    def sampled_places(self) -> list[int]:
        """Places whose logits have made the sampled tokens, in the order of the requests."""
        return [
            request * STRIDE + at - 1
            for request, (tokens, count) in enumerate(zip(self.tokens, self.sampled, strict=True))
            for at in range(len(tokens) - count, len(tokens))
        ]

    def save(self, path: Path) -> None:
        """Write the run as tensors and plain values, which `load` reads without running code of the file."""
        number = {id(call): i for i, call in enumerate(self.calls)}
        calls = [
            {
                **{name: getattr(call, name) for name in _CALL},
                "parent": None if call.parent is None else number[id(call.parent)],
                "inputs": [tuple(one) for one in call.inputs],
                "outputs": [tuple(one) for one in call.outputs],
                "module": None if call.module is None else _portable(call.module),
            }
            for call in self.calls
        ]
        torch.save({**vars(self), "calls": calls}, path)

    @classmethod
    def load(cls, path: Path) -> RecordedRun:
        """Read what `save` has written."""
        read = torch.load(path, weights_only=True)
        known: dict[tuple[Any, ...], KeptTensor] = {}

        def kept(values: tuple[Any, ...]) -> KeptTensor:
            one = KeptTensor(*values)
            # Calls that were given one tensor are known by it.
            return known.setdefault((one.shape, one.is_sketch, fingerprint(one.rows)), one)

        found = cls(**{**read, "calls": []})
        for call in read["calls"]:
            found.calls.append(
                ModuleCall(
                    **{name: call[name] for name in _CALL},
                    parent=None,
                    inputs=[kept(one) for one in call["inputs"]],
                    outputs=[kept(one) for one in call["outputs"]],
                    module=None if call["module"] is None else stand_in(call["module"]),
                )
            )
        for one, call in zip(found.calls, read["calls"], strict=True):
            weight = weight_of(one.module)
            one.weight_shape = () if weight is None else tuple(weight.shape)
            one.parent = None if call["parent"] is None else found.calls[call["parent"]]
        return found

    def restrict(self, places: Tensor) -> None:
        """Forget the rows of other places."""
        known: dict[int, KeptTensor] = {}
        for call in self.calls:
            for values in (call.inputs, call.outputs):
                values[:] = [known.setdefault(id(one), _at(one, places)) for one in values]


_CALL = ("key", "class_name", "start", "end", "is_leaf", "weight_shape")


def _at(kept: KeptTensor, places: Tensor) -> KeptTensor:
    if kept.places is None:
        return kept
    at = torch.isin(kept.places, places)
    if bool(at.all()):
        return kept
    return kept._replace(shape=(int(at.sum()), *kept.shape[1:]), rows=kept.rows[at], places=kept.places[at])


def _portable(module: nn.Module) -> dict[str, Any]:
    """Return what another process needs of a module: its class, settings, and its tensors as sketches of their rows."""
    known: dict[str, Any] | None = vars(module).get("_nanwatch_portable")
    if known is not None:
        return known
    settings = {name: one for name, one in vars(module).items() if type(one) in (bool, int, float, str)}
    tensors = {
        name: (_narrow(unpadded(module, x)), name in module._parameters)
        for name, x in own_tensors(module).items()
    }
    return {
        "class": type(module).__name__,
        "settings": settings,
        "tensors": tensors,
        "blocks": block_sizes(module),
    }


def keep_portable(model: nn.Module) -> None:
    """Remember the weights of all modules as they are now: an engine may pack them, and leave nothing to read."""
    for _, module in each_module(model):
        vars(module)["_nanwatch_portable"] = _portable(module)


def _narrow(x: Tensor) -> Tensor:
    if x.ndim < 2:
        return x.cpu()
    rows = x.flatten(1)
    return (sketches(rows).to(torch.float32) if rows.shape[1] > WIDTH else rows).cpu()


def stand_in(portable: Mapping[str, Any]) -> nn.Module:
    """Return a module of that class name, with those settings, and with sketches in place of its weights."""
    found: nn.Module = type(portable["class"], (nn.Module,), {})()
    vars(found).update(portable["settings"], output_sizes=portable["blocks"])
    for name, (x, is_parameter) in portable["tensors"].items():
        own = found._parameters if is_parameter else found._buffers
        own[name] = x
    return found


def unpadded(module: nn.Module, x: Tensor) -> Tensor:
    """Return the rows of words alone: vLLM's vocabularies are padded."""
    words = getattr(module, "org_vocab_size", None)
    return x[:words] if isinstance(words, int) and x.ndim > 1 and len(x) > words else x


def fingerprints(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, list[int]]:
    """Return the fingerprints of each parameter, or of its cast to `dtype`, by name: one for each fused part."""
    found = {}
    for path, module in each_module(model):
        sizes = block_sizes(module)
        for name, x in module._parameters.items():
            if x is None or x.is_meta or not x.numel():
                continue
            whole = unpadded(module, x.detach() if dtype is None else x.detach().to(dtype))
            parts: Iterable[Tensor] = whole.split(sizes) if sum(sizes) == len(whole) else [whole]
            found[".".join(filter(None, (path, name)))] = [fingerprint(one) for one in parts]
    return found


def stale(a: Mapping[str, Sequence[int]], b: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the names of the weights of B of which a part has bits that no weight of A has.

    A name that both have, with as many parts, is held to its own weight. A fused weight is held to all: its parts have
    other names there.
    """
    known = {one for prints in a.values() for one in prints}
    found = []
    for name, prints in b.items():
        ours = a.get(name)
        if ours is not None and len(ours) == len(prints):
            found += [] if list(ours) == list(prints) else [name]
        else:
            off = [i for i, one in enumerate(prints) if one not in known]
            part = f" (part {', '.join(str(i) for i in off)} of {len(prints)})" if len(prints) > 1 else ""
            found += [name + part] if off else []
    return found
