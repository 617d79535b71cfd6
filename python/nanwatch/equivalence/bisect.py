"""`nanwatch.bisect`: find the switch that changes a model's numbers, such as one module that is compiled wrongly."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, log2
from typing import Any

import torch
from torch import Tensor, nn

from ..instrumentation.wrapped_names import name_of, unwrapped
from ..numerics.ranges import fingerprint
from ..precision.casting import replaced
from ..recording.walk import leaves
from ..util.progress import Tell, silent
from ..util.reading import plain
from ..util.visible import spell, visible
from .state import State
from .switches import Switch, switched, switches_of

# An error of so many times that of the reference is no rounding. Kernels that round in another order reach 3.
_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class Bisection:
    """Result of `nanwatch.bisect`.

    `changed_by` describes the switch that changes the numbers, or is "" when none does; `module` and `class_name` are
    of the module that it compiles. `label` is the tensor in which that shows, `error` its relative error with the
    switch and `floor` that without it, both against a run in `reference`. With the reference "bits", `error` is that
    against the run with all switches off. `raised` is the exception with which the run ended. `switches`, `runs` and
    `parts` (modules inside the module) are counts.
    """

    changed_by: str
    module: str
    class_name: str
    label: str
    error: float
    floor: float
    reference: str
    raised: str
    switches: int
    runs: int
    parts: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True when no switch changes the numbers."""
        return not self.changed_by

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        return json.dumps({"equal": self.equal, **plain(self)}, indent=2)

    def to_text(self) -> str:
        """Return the result for people."""
        amount = f"{self.switches} switch{'' if self.switches == 1 else 'es'}, {self.runs} runs"
        if self.equal:
            lines = [f"Nothing changes the numbers {self._beyond} ({amount})."]
        else:
            lines = [f"Changed by: {self.changed_by} ({amount})"]
            if self.raised:
                lines.append(f"            which ends the run by {self.raised}")
        if self.label and not self.raised:
            lines.append(f"Largest:    `{self.label}`, {self._errors}")
        if self.class_name:
            fused = "its own forward, and what is fused across its parts: each alone is right"
            lines.append(f"Look at:    {fused if self.parts else 'its operations'}.")
            lines.append("            Kept eager by torch.compiler.disable, it computes as before")
        lines += ["", *(f"Note: {remark}" for remark in self.remarks)] if self.remarks else []
        return "\n".join(map(visible, lines))

    @property
    def _beyond(self) -> str:
        return "in any bit" if self.reference == "bits" else "beyond rounding"

    @property
    def _errors(self) -> str:
        if self.reference == "bits":
            return f"relative difference {self.error:.1e} from the run without any"
        return f"relative error {self.error:.1e} against a {self.reference} run, {self.floor:.1e} without any switch"


def bisect(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | bool = False,
    switches: Sequence[str] | None = None,
    backend: str | Callable[..., Any] = "inductor",
    exact: bool = False,
    tell: Tell = silent,
) -> Bisection:
    """Find the switch that changes what a model computes, in at most log2(n) + 3 runs for n switches.

    Args:
        model: the module to call. Its training mode is left as it is; random numbers are alike in each run.
        inputs: its arguments: a dict by name, a tuple by position, or the only one.
        loss: a function of the output, or True for the sum of the squares of all its floating-point tensors. With it
            the gradients of the parameters are compared too.
        switches: names of the switches: "autocast", "tf32" (the precision of float32 products), "sdpa" (fused
            attention), "fastpath" (of transformer layers), "mkldnn", "threads", "compile" (one switch for each module).
            By default those that are on at present, and "compile".
        backend: that of torch.compile.
        exact: count a difference in any bit, not only errors above the noise floor.
        tell: called with the progress.

    The first run has all switches off: eager, one thread, the plainest kernels. Another has all of them on. Where that
    one differs, halving finds the first switch with which a run does. Modules come after their parts, so a module that
    is named is the smallest that is compiled wrongly.

    The noise floor is the error of the first run against one in float64. An error ten times as large is a change. Where
    the model cannot run in float64 (or float32), every bit counts. State, gradients and random numbers are put back.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> print(nanwatch.bisect(model, torch.ones(2, 4), switches=["threads"]).to_text().splitlines()[0])
        Nothing changes the numbers beyond rounding (1 switch, 3 runs).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model should be a torch.nn.Module, got {type(model).__name__}")
    model = unwrapped(model)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple) else (inputs,)
    tensors = [x for _, x in leaves((args, kwargs), "") if isinstance(x, Tensor)]
    device = next((x.device.type for x in (*model.parameters(), *tensors)), "cpu")
    found = switches_of(model, switches, device)
    if not found:
        raise ValueError("none of the switches is on at present; name some with switches=")
    state = State([model, *tensors])
    with state.kept():
        function = _squares if loss is True else loss or None
        return _Bisection(model, args, kwargs, function, found, backend, state, tell).find(exact)


class _Bisection:
    """Runs of one model under more or fewer switches."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Callable[[Any], Tensor] | None,
        switches: list[Switch],
        backend: Any,
        state: State,
        tell: Tell,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._kwargs = kwargs
        self._loss = loss
        self._switches = switches
        self._backend = backend
        self._state = state
        self._tell = tell
        self._runs = 0
        self._reference: dict[str, Tensor] = {}
        self._floors: dict[str, float] = {}
        self._kind = "bits"
        self._last: tuple[str, float, str] = ("", 0.0, "")

    def find(self, exact: bool) -> Bisection:
        """Return the first switch that changes the numbers."""
        most = ceil(log2(max(len(self._switches), 1))) + 3
        plainest = self._run(0)
        self._reference = plainest
        remarks = [] if exact else self._measure_floor(plainest)
        largest = self._look(len(self._switches))
        if largest is None:
            return self._result(None, self._last, remarks)
        # With the first `low` switches there is no change, with the first `high` there is one.
        low, high = 0, len(self._switches)
        while high - low > 1:
            middle = (low + high) // 2
            change = self._look(middle)
            if change is None:
                low = middle
            else:
                high, largest = middle, change
        assert self._runs <= most
        return self._result(self._switches[high - 1], largest, remarks)

    def _result(
        self, switch: Switch | None, largest: tuple[str, float, str], remarks: Sequence[str] = ()
    ) -> Bisection:
        label, error, raised = largest
        module = None if switch is None else switch.module
        return Bisection(
            changed_by="" if switch is None else switch.words,
            module="" if module is None else name_of(self._model, module),
            class_name="" if module is None else type(module).__name__,
            label=label,
            error=error,
            floor=self._floors.get(label, 0.0),
            reference=self._kind,
            raised=raised,
            switches=len(self._switches),
            runs=self._runs,
            parts=0 if module is None else len(list(module.modules())) - 1,
            remarks=tuple(remarks),
        )

    def _measure_floor(self, plainest: dict[str, Tensor]) -> list[str]:
        """Run in float64 and take the error of the plainest run as the floor. Return why that cannot be."""
        narrow = any(x.dtype.itemsize < 4 for x in self._model.parameters() if x.is_floating_point())
        why = ""
        for dtype in (torch.float64, torch.float32) if narrow else (torch.float64,):
            try:
                model = copy.deepcopy(self._model).to(dtype)
                inputs, kwargs = replaced((self._inputs, self._kwargs), functools.partial(_to, dtype))
                self._reference = self._run(0, model, inputs, kwargs)
                self._kind = str(dtype).removeprefix("torch.")
                floors = {label: max(one, _eps(plainest[label])) for label, one in self._errors(plainest)}
                if any(one > _eps(plainest[label]) ** 0.5 for label, one in floors.items()):
                    raise ValueError("it computes something else there, as with other random numbers")
            except Exception as error:
                why = why or spell(error)
                continue
            self._floors = floors
            return []
        self._reference, self._kind = plainest, "bits"
        return [
            f"the noise floor is not known, so every bit counts: in float64 the model is not the same ({why})"
        ]

    def _look(self, number: int) -> tuple[str, float, str] | None:
        """Run with that many switches on. Return the tensor that has changed most, its error, and any exception."""
        try:
            made = self._run(number)
        except Exception as error:  # a compiler that fails has changed something too
            return "", inf, spell(error)
        found = self._errors(made)
        ratio = {label: error / self._floors.get(label, 1.0) for label, error in found}
        label, largest = max(found, key=lambda one: ratio[one[0]], default=("", 0.0))
        self._last = label, largest, ""
        is_changed = largest > 0 if self._kind == "bits" else ratio.get(label, 0.0) > _FACTOR
        return self._last if is_changed else None

    def _errors(self, made: dict[str, Tensor]) -> list[tuple[str, float]]:
        if made.keys() != self._reference.keys():
            return [("output", inf)]
        return [(label, _error(made[label], x, self._kind == "bits")) for label, x in self._reference.items()]

    def _run(
        self, number: int, model: nn.Module | None = None, inputs: Any = None, kwargs: Any = None
    ) -> dict[str, Tensor]:
        """Return copies of what the model computes with the first `number` switches on."""
        self._runs += 1
        self._tell(f"run {self._runs}: {number} of {len(self._switches)} switches on")
        self._state.restore()
        if model is None:
            model, inputs, kwargs = self._model, self._inputs, self._kwargs
        with switched(self._switches, number, self._backend), torch.set_grad_enabled(self._loss is not None):
            output = model(*inputs, **kwargs)
            made = [("output", output)]
            if self._loss is not None:
                parameters = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
                gradients = torch.autograd.grad(
                    self._loss(output), [x for _, x in parameters], allow_unused=True, materialize_grads=True
                )
                made += [(f"{name}.grad", x) for (name, _), x in zip(parameters, gradients, strict=True)]
        tensors = [one for label, value in made for one in leaves(value, label) if isinstance(one[1], Tensor)]
        floating = [one for one in tensors if one[1].is_floating_point()] or tensors
        return {label: x.detach().clone() for label, x in floating}


def _squares(output: Any) -> Tensor:
    floating = [x for _, x in leaves(output, "") if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.stack([x.square().sum() for x in floating]).sum()


def _to(dtype: torch.dtype, x: Tensor) -> Tensor | None:
    return x.to(dtype) if x.is_floating_point() else None


def _eps(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps if x.is_floating_point() else 1.0


def _error(x: Tensor, reference: Tensor, exact: bool) -> float:
    """Return the largest error relative to the largest magnitude; infinity where non-finite elements differ."""
    if x.shape != reference.shape or (exact and x.dtype != reference.dtype):
        return inf
    if exact and fingerprint(x) == fingerprint(reference):
        return 0.0
    wide = torch.complex128 if x.is_complex() else torch.float64
    ours, theirs = x.to(wide), reference.to(wide)
    finite = torch.isfinite(theirs)
    same = torch.isfinite(ours) == finite
    if not bool(same.all()):
        return inf
    if not bool(finite.any()):
        return 0.0
    difference = (ours - theirs)[finite].abs().max()
    error = float(difference / theirs[finite].abs().max().clamp_min(torch.finfo(torch.float64).tiny))
    # Bits that differ and numbers that do not, such as zeros of two signs.
    return error or (torch.finfo(torch.float64).tiny if exact else 0.0)
