"""`nanwatch.bisect`: find the switch that changes a model's numbers, such as one module that is compiled wrongly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf, log2
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..instrumentation.wrapped_names import name_of, unwrapped
from ..numerics.ranges import fingerprint
from ..precision.casting import replaced
from ..recording.walk import leaves
from ..util.progress import Tell, silent
from ..util.visible import module_name, spell
from .results import Bisection
from .state import State, temporarily

# An error of so many times that of the reference is no rounding. Kernels that round in another order reach 3.
_FACTOR = 10.0


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


@dataclass
class _Bisection:
    """Runs of one model under more or fewer switches."""

    model: nn.Module
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None
    switches: list[Switch]
    backend: Any
    state: State
    tell: Tell
    runs: int = 0
    reference: dict[str, Tensor] = field(default_factory=dict)
    kind: str = "bits"
    floors: dict[str, float] = field(default_factory=dict)
    last: tuple[str, float, str] = ("", 0.0, "")

    def find(self, exact: bool) -> Bisection:
        """Return the first switch that changes the numbers."""
        most = ceil(log2(max(len(self.switches), 1))) + 3
        plainest = self._run(0)
        self.reference = plainest
        remarks = [] if exact else self._measure_floor(plainest)
        largest = self._look(len(self.switches))
        if largest is None:
            return self._result(None, self.last, remarks)
        # With the first `low` switches there is no change, with the first `high` there is one.
        low, high = 0, len(self.switches)
        while high - low > 1:
            middle = (low + high) // 2
            change = self._look(middle)
            if change is None:
                low = middle
            else:
                high, largest = middle, change
        assert self.runs <= most
        return self._result(self.switches[high - 1], largest, remarks)

    def _result(
        self, switch: Switch | None, largest: tuple[str, float, str], remarks: list[str]
    ) -> Bisection:
        label, error, raised = largest
        module = None if switch is None else switch.module
        return Bisection(
            changed_by="" if switch is None else switch.words,
            module="" if module is None else name_of(self.model, module),
            class_name="" if module is None else type(module).__name__,
            label=label,
            error=error,
            floor=self.floors.get(label, 0.0),
            reference=self.kind,
            raised=raised,
            switches=len(self.switches),
            runs=self.runs,
            parts=0 if module is None else len(list(module.modules())) - 1,
            remarks=tuple(remarks),
        )

    def _measure_floor(self, plainest: dict[str, Tensor]) -> list[str]:
        """Run in float64 and take the error of the plainest run as the floor. Return why that cannot be."""
        narrow = any(x.dtype.itemsize < 4 for x in self.model.parameters() if x.is_floating_point())
        why = ""
        for dtype in (torch.float64, torch.float32) if narrow else (torch.float64,):
            try:
                model = copy.deepcopy(self.model).to(dtype)
                inputs, kwargs = replaced((self.inputs, self.kwargs), partial(_to, dtype))
                self.reference = self._run(0, model, inputs, kwargs)
                self.kind = str(dtype).removeprefix("torch.")
                floors = {label: max(one, _eps(plainest[label])) for label, one in self._errors(plainest)}
                if any(one > _eps(plainest[label]) ** 0.5 for label, one in floors.items()):
                    raise ValueError("it computes something else there, as with other random numbers")
            except Exception as error:
                why = why or spell(error)
                continue
            self.floors = floors
            return []
        self.reference, self.kind = plainest, "bits"
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
        ratio = {label: error / self.floors.get(label, 1.0) for label, error in found}
        label, largest = max(found, key=lambda one: ratio[one[0]], default=("", 0.0))
        self.last = label, largest, ""
        is_changed = largest > 0 if self.kind == "bits" else ratio.get(label, 0.0) > _FACTOR
        return self.last if is_changed else None

    def _errors(self, made: dict[str, Tensor]) -> list[tuple[str, float]]:
        if made.keys() != self.reference.keys():
            return [("output", inf)]
        return [(label, _error(made[label], x, self.kind == "bits")) for label, x in self.reference.items()]

    def _run(
        self, number: int, model: nn.Module | None = None, inputs: Any = None, kwargs: Any = None
    ) -> dict[str, Tensor]:
        """Return copies of what the model computes with the first `number` switches on."""
        self.runs += 1
        self.tell(f"run {self.runs}: {number} of {len(self.switches)} switches on")
        self.state.restore()
        if model is None:
            model, inputs, kwargs = self.model, self.inputs, self.kwargs
        with switched(self.switches, number, self.backend), torch.set_grad_enabled(self.loss is not None):
            output = model(*inputs, **kwargs)
            made = [("output", output)]
            if self.loss is not None:
                parameters = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
                gradients = torch.autograd.grad(
                    self.loss(output), [x for _, x in parameters], allow_unused=True, materialize_grads=True
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


Setting = Callable[[], AbstractContextManager[Any]]
# Dynamo leaves a module of torch.nn alone unless its call is wrapped. Each module of a class is one more compilation of
# the same code, of which 8 are allowed, and other numbers in it would make Dynamo take them for variables.
_DYNAMO = {
    "wrap_top_frame": True,
    "recompile_limit": 1 << 20,
    "accumulated_recompile_limit": 1 << 20,
    "automatic_dynamic_shapes": False,
    "specialize_float": True,
}


@dataclass(frozen=True)
class Switch:
    """One switch. `on` and `off` are contexts of a run; a switch of a `module` compiles it instead.

    `off` is the setting that rounds least or in the most predictable way. `words` describe it switched on.
    """

    words: str
    on: Setting = nullcontext
    off: Setting = nullcontext
    module: nn.Module | None = None


def _switch(words: str, setter: Callable[[Any], object], before: Any, on: Any, off: Any) -> Switch:
    return Switch(words, partial(temporarily, setter, on, before), partial(temporarily, setter, off, before))


def _set_matmul_precision(value: tuple[str, bool]) -> None:
    torch.set_float32_matmul_precision(value[0])
    torch.backends.cudnn.allow_tf32 = value[1]


def _settings(device: str) -> dict[str, tuple[bool, Switch]]:
    """Return the switches by name, each with whether its setting is on at present."""
    is_autocast, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    tf32 = precision if precision != "highest" else "high"
    number, mha = torch.get_num_threads(), torch.backends.mha
    fastpath, mkldnn = mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    most = max(number, 2)
    return {
        "autocast": (
            is_autocast,
            Switch(
                f"torch.autocast({device!r}, {dtype})",
                partial(torch.autocast, device, dtype),
                partial(torch.autocast, device, enabled=False),
            ),
        ),
        "tf32": (
            precision != "highest" or (device == "cuda" and cudnn),
            _switch(
                f"torch.set_float32_matmul_precision({tf32!r})",
                _set_matmul_precision,
                (precision, cudnn),
                (tf32, True),
                ("highest", False),
            ),
        ),
        "sdpa": (
            True,
            Switch(
                "fused attention kernels (SDPBackend other than MATH)",
                off=partial(sdpa_kernel, SDPBackend.MATH),
            ),
        ),
        "fastpath": (
            fastpath,
            _switch("torch.backends.mha fast path", mha.set_fastpath_enabled, fastpath, True, False),
        ),
        "mkldnn": (
            mkldnn,
            _switch("torch.backends.mkldnn", torch._C._set_mkldnn_enabled, mkldnn, True, False),
        ),
        "threads": (
            number > 1,
            _switch(f"torch.set_num_threads({most})", torch.set_num_threads, number, most, 1),
        ),
    }


NAMES = ("autocast", "tf32", "sdpa", "fastpath", "mkldnn", "threads", "compile")


def switches_of(model: nn.Module, names: Sequence[str] | None, device: str) -> list[Switch]:
    """Return the switches of these names, or all whose setting is on at present and the compilation of all modules.

    Modules come after their children, so that a module is switched on when all its parts are.
    """
    settings = _settings(device)
    for name in names or ():
        if name not in NAMES:
            raise ValueError(f"there is no switch {name!r}; the switches are {', '.join(NAMES)}")
    found = [one for name, (is_on, one) in settings.items() if (is_on if names is None else name in names)]
    if names is None or "compile" in names:
        found += [
            Switch(f"torch.compile of {module_name(name_of(model, one))} ({type(one).__name__})", module=one)
            for one in _after_children(model, set())
            if type(one).forward is not nn.Module.forward
        ]
    return found


def _after_children(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yield the modules below and then this one, each once."""
    seen.add(id(module))
    for child in module._modules.values():
        if child is not None and id(child) not in seen:
            yield from _after_children(child, seen)
    yield module


@contextmanager
def switched(switches: Sequence[Switch], number: int, backend: Any) -> Iterator[None]:
    """Switch the first `number` on inside the block, and the others off."""
    with ExitStack() as after:
        for i, one in enumerate(switches):
            after.enter_context((one.on if i < number else one.off)())
        compiled = [one.module for one in switches[:number] if one.module is not None]
        if not compiled:
            after.enter_context(torch.compiler.set_stance("force_eager"))
        else:
            after.enter_context(_compiled(compiled, backend))
        yield


@contextmanager
def _compiled(modules: list[nn.Module], backend: Any) -> Iterator[None]:
    """Compile these modules, each as a whole with its parts."""
    inner = {id(child) for one in modules for child in one.modules() if child is not one}
    before = [(one, one.__dict__.get("_compiled_call_impl")) for one in modules if id(one) not in inner]
    import torch._inductor.config as inductor  # 0.1 s, and only where modules are compiled

    dynamo = {name: value for name, value in _DYNAMO.items() if hasattr(torch._dynamo.config, name)}
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(dynamo), inductor.patch(fallback_random=True):
            for one, _ in before:
                one.compile(backend=backend)
            yield
    finally:
        for one, own in before:
            one.__dict__.pop("_compiled_call_impl", None)
            if own is not None:
                one._compiled_call_impl = own
        torch._dynamo.reset()
