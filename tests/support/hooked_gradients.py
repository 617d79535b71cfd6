"""The oracle for backward frames: plain forward hooks and tensor hooks on a model that nobody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from nanwatch.records.record import Frame
from nanwatch.session.watch import Watch

# A module's name, and what came for one call of it: label, shape, smallest and largest magnitude.
Seen: TypeAlias = tuple[str, tuple[tuple[str, tuple[int, ...], float, float], ...]]


def seen(frames: Iterable[Frame]) -> list[Seen]:
    """The same of the frames of backwards."""
    return [
        (
            frame.name,
            tuple((r.label.removesuffix(".grad"), r.shape, r.abs_min, r.abs_max) for r in frame.records),  # type: ignore[misc]
        )
        for frame in frames
        if frame.phase == "backward"
    ]


def new_frames(w: Watch) -> Callable[[], list[Seen]]:
    """Asked again and again: the backward frames since the last time."""
    known = 0

    def new() -> list[Seen]:
        nonlocal known
        frames = seen(w.frames)
        known, before = len(frames), known
        return frames[before:]

    return new


@dataclass(eq=False)
class _Call:
    module: str
    parent: _Call | None
    number: int = -1


class _Arrival(NamedTuple):
    call: _Call
    part: str
    label: str
    gradient: Tensor


class HookedGradients:
    """Puts hooks on every module, and in each forward on the tensors of each call, as anybody would."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._stack: list[_Call] = []
        self._calls = 0
        self._arrivals: list[_Arrival] = []
        self._users: dict[tuple[str, str], list[_Call]] = {}  # the calls that used a module's weight
        self._hooked: set[tuple[str, str]] = set()
        for module in self._names:
            module.register_forward_pre_hook(self._begins)
            module.register_forward_hook(self._ends, with_kwargs=True)

    def take(self, *, again: bool = False) -> list[Seen]:
        """Return the gradients of one backward, in the order of completed calls. `again`: its forward may have more."""
        arrivals, self._arrivals = self._arrivals, []
        if not again:
            self._users = {}
        reached: set[_Call] = set()
        rows: dict[_Call, list[Any]] = {}
        done: dict[_Call, int] = {}
        for time, (call, part, label, gradient) in enumerate(arrivals):
            reached |= {call} if part == "output" else set()
            if part == "input" and call not in reached:
                continue  # what it was given has a gradient from elsewhere
            magnitude = gradient.abs()
            row = (label, tuple(gradient.shape), magnitude.min().item(), magnitude.max().item())
            rows.setdefault(call, []).append(row)
            around: _Call | None = call
            while around is not None:
                done[around] = time
                around = around.parent
        return [
            (call.module, tuple(rows[call])) for call in sorted(rows, key=lambda one: (done[one], one.number))
        ]

    def _begins(self, module: nn.Module, args: Any) -> None:
        self._stack.append(_Call(self._names[module], self._stack[-1] if self._stack else None))

    def _ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._stack.pop()
        call.number = self._calls
        self._calls += 1
        outputs = {label: x for label, x in labelled(output, "output").items() if not x.is_leaf}
        if not outputs:
            return
        inputs: dict[str, Tensor] = {}
        for i, value in enumerate(args):
            inputs |= labelled(value, f"input[{i}]")
        for name, value in kwargs.items():
            inputs |= labelled(value, name)
        for label, x in inputs.items():
            if not any(x is one for one in outputs.values()):
                x.register_hook(self._noter(call, "input", label))
        for label, x in outputs.items():
            x.register_hook(self._noter(call, "output", label))
        for label, p in module.named_parameters(recurse=False):
            self._users.setdefault((call.module, label), []).append(call)
            if p.requires_grad and (call.module, label) not in self._hooked:
                self._hooked.add((call.module, label))
                p.register_hook(self._weight_noter(call.module, label))

    def _noter(self, call: _Call, part: str, label: str) -> Callable[[Tensor | None], None]:
        def note(gradient: Tensor | None) -> None:
            if gradient is not None:
                self._arrivals.append(_Arrival(call, part, label, gradient.detach().clone()))

        return note

    def _weight_noter(self, module: str, label: str) -> Callable[[Tensor | None], None]:
        def note(gradient: Tensor | None) -> None:
            reached = {one.call for one in self._arrivals if one.part == "output"}
            users = self._users.get((module, label), [])
            # The sum over all calls is there when the first call is done. A double backward may end at a weight whose
            # module's output has no part in it.
            whose = next((call for call in users if call in reached), users[-1] if users else None)
            if gradient is not None and whose is not None:
                self._arrivals.append(_Arrival(whose, "weight", label, gradient.detach().clone()))

        return note


def labelled(value: Any, label: str) -> dict[str, Tensor]:
    """The tensors with a gradient in nested containers."""
    if isinstance(value, Tensor):
        return {label: value} if value.requires_grad else {}
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    found: dict[str, Tensor] = {}
    for key, one in items:
        found |= labelled(one, f"{label}[{key}]")
    return found


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Each parameter's gradient as it lies there."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def train(
    model: nn.Module,
    batches: Iterable[Any],
    loss_of: Callable[[Any, int], Tensor],
    *,
    after_step: Callable[[nn.Module, int], None] = lambda model, step: None,
    after_backward: Callable[[], None] = lambda: None,
) -> list[Any]:
    """A step of momentum for each batch. Returns losses, gradients and the weights of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trace: list[Any] = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model(batch), step)
        loss.backward()
        after_backward()
        trace.append((loss.detach().clone(), gradients_of(model)))
        optimizer.step()
        trace.append({name: x.clone() for name, x in model.state_dict().items()})
        after_step(model, step)
    return trace
