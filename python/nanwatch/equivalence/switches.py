"""Switches that may change what a model computes: settings of PyTorch, and each module compiled or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..instrumentation.wrapped_names import name_of
from ..util.visible import module_name

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


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _matmul_precision(name: str) -> Iterator[None]:
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(name)
    torch.backends.cudnn.allow_tf32 = name != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn


@contextmanager
def _fastpath(enabled: bool) -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _mkldnn(enabled: bool) -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _settings(device: str) -> dict[str, tuple[bool, Switch]]:
    """Return the switches by name, each with whether its setting is on at present."""
    is_autocast, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    precision = torch.get_float32_matmul_precision()
    number = torch.get_num_threads()
    return {
        "autocast": (
            is_autocast,
            Switch(
                f"torch.autocast({device!r}, {dtype})",
                lambda: torch.autocast(device, dtype),
                lambda: torch.autocast(device, enabled=False),
            ),
        ),
        "tf32": (
            precision != "highest" or (device == "cuda" and torch.backends.cudnn.allow_tf32),
            Switch(
                f"torch.set_float32_matmul_precision({precision if precision != 'highest' else 'high'!r})",
                lambda: _matmul_precision(precision if precision != "highest" else "high"),
                lambda: _matmul_precision("highest"),
            ),
        ),
        "sdpa": (
            True,
            Switch(
                "fused attention kernels (SDPBackend other than MATH)",
                off=lambda: sdpa_kernel(SDPBackend.MATH),
            ),
        ),
        "fastpath": (
            torch.backends.mha.get_fastpath_enabled(),
            Switch("torch.backends.mha fast path", lambda: _fastpath(True), lambda: _fastpath(False)),
        ),
        "mkldnn": (
            torch._C._get_mkldnn_enabled(),
            Switch("torch.backends.mkldnn", lambda: _mkldnn(True), lambda: _mkldnn(False)),
        ),
        "threads": (
            number > 1,
            Switch(
                f"torch.set_num_threads({max(number, 2)})",
                lambda: _threads(max(number, 2)),
                lambda: _threads(1),
            ),
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
            for one in _after_children(model)
            if type(one).forward is not nn.Module.forward
        ]
    return found


def _after_children(root: nn.Module) -> list[nn.Module]:
    seen: set[int] = set()
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        seen.add(id(module))
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                visit(child)
        found.append(module)

    visit(root)
    return found


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
    inductor = _inductor_config()
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


def _inductor_config() -> Any:
    import torch._inductor.config as config  # 0.1 s, and only where modules are compiled

    return config
