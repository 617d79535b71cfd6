"""Run of a model by a trainer or an engine, with calls, weights, tokens and settings, for another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics._fingerprint import WIDTH
from ..numerics.ranges import fingerprint
from ..util.modules import each_module
from .calls import ModuleCall
from .differences import own_tensors, sketches, weight_of
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

    def take_calls(self, run: PackedRun) -> RecordedRun:
        """Take the calls of a run in steps, with modules that can be sent to another process."""
        self.calls, self.steps = run.calls(), run.steps
        modules = {id(one.module): one.module for one in self.calls if one.module is not None}
        stand_ins = {key: _stand_in(one) for key, one in modules.items()}
        for call in self.calls:
            call.module = stand_ins.get(id(call.module))
            weight = weight_of(call.module)
            call.weight_shape = () if weight is None else tuple(weight.shape)
        floats = (kept.rows.dtype for one in self.calls for kept in one.outputs if not kept.is_sketch)
        self.dtype = most_common(floats, self.dtype)
        return self

    @property
    def sampled_places(self) -> list[int]:
        """Places whose logits have made the sampled tokens, in the order of the requests."""
        return [
            request * STRIDE + at - 1
            for request, (tokens, count) in enumerate(zip(self.tokens, self.sampled, strict=True))
            for at in range(len(tokens) - count, len(tokens))
        ]

    def restrict(self, places: Tensor) -> None:
        """Forget the rows of other places."""
        known = {id(one): one.at(places) for call in self.calls for one in (*call.inputs, *call.outputs)}
        for call in self.calls:
            call.inputs, call.outputs = (
                [known[id(one)] for one in kept] for kept in (call.inputs, call.outputs)
            )


class _StandIn(nn.Module):
    """Module without code, with the class name, the settings and the tensors of another, as sketches of their rows."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (type(self).__name__, vars(self))


def _made(name: str, state: dict[str, Any]) -> nn.Module:
    found: nn.Module = type(name, (_StandIn,), {})()
    vars(found).update(state)
    return found


def _stand_in(module: nn.Module) -> nn.Module:
    state = {name: one for name, one in vars(module).items() if type(one) in (bool, int, float, str)}
    state |= {"output_sizes": block_sizes(module), "_parameters": {}, "_buffers": {}}
    for name, x in {**own_tensors(module), **_weight(module)}.items():
        is_wide = x.ndim > 1 and x[0].numel() > WIDTH
        rows = sketches(x.flatten(1)).to(torch.float32) if is_wide else x
        state["_parameters" if name in module._parameters else "_buffers"][name] = rows.cpu()
    return _made(type(module).__name__, state)


def _weight(module: nn.Module) -> dict[str, Tensor]:
    """Return a weight that vLLM has padded, without that, or packed on a CPU, by its products with unit vectors."""
    weight, linear = module._parameters.get("weight"), getattr(module, "cpu_linear", None)
    words, width = (getattr(module, name, None) for name in ("org_vocab_size", "input_size_per_partition"))
    if weight is not None and not weight.numel() and linear is not None and width:
        return {"weight": linear(torch.eye(width, dtype=weight.dtype), weight, None).t()}
    return {"weight": weight.detach()[:words]} if weight is not None and isinstance(words, int) else {}


def fingerprints(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, list[int]]:
    """Return the fingerprints of each parameter, or of its cast to `dtype`, by name: one for each fused part."""
    found = {}
    for path, module in each_module(model):
        sizes = block_sizes(module)
        for name, x in {**module._parameters, **_weight(module)}.items():
            if x is None or x.is_meta or not x.numel():
                continue
            whole = x.detach().to(dtype or x.dtype)
            parts = whole.split(sizes) if sum(sizes) == len(whole) else [whole]
            found[".".join(filter(None, (path, name)))] = [fingerprint(one) for one in parts]
    return found


def stale(a: Mapping[str, Sequence[int]], b: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the names of the weights of B of which a part has other bits than in A.

    A weight is held to that of its name, and the parts of a fused one to those beside it in A that B has not, in their
    order. Where their numbers differ, A should have these bits anywhere.
    """
    beside: dict[tuple[str, str], list[int]] = {}
    for name, prints in a.items():
        if name not in b:
            beside.setdefault(_around(name), []).extend(prints)
    known = {one for prints in a.values() for one in prints}
    found = []
    for name, prints in b.items():
        is_fused = len(prints) > 1
        ours = a.get(name) or (beside.get(_around(name)) if is_fused else None) or ()
        wanted = [{one} for one in ours] if len(ours) == len(prints) else [known] * len(prints)
        off = [i for i, one in enumerate(prints) if one not in wanted[i]]
        part = f" (part {', '.join(map(str, off))} of {len(prints)})" if is_fused else ""
        found += [name + part] if off else []
    return found


def _around(name: str) -> tuple[str, str]:
    """Return the module around that of a weight, and the weight's own name."""
    path, _, own = name.rpartition(".")
    return path.rpartition(".")[0], own
