"""The words for modules and for changes to them, as a user can copy them into code."""

from __future__ import annotations

from torch import nn

from ..instrumentation.wrapped_names import named_modules


def module_words(name: str) -> str:
    """The module in prose."""
    return f"`{name}`" if name else "the model"


def in_float32(model: nn.Module, name: str, *, cast_output: bool = True) -> str:
    """The cure of running this module of `model` in float32."""
    option = "" if cast_output else ", cast_output=False"
    return f"run {module_words(name)} in float32, nanwatch.run_in_fp32({_code(model, name)}{option})"


def _code(model: nn.Module, name: str) -> str:
    """The expression that reaches the module in Python: `model.decoder.block[0]`."""
    path = next((one.path for one in named_modules(model, remove_duplicate=False) if one.name == name), name)
    code, module = "model", model
    for part in path.split(".") if path else ():
        if isinstance(module, nn.ModuleList | nn.Sequential) and part.isdecimal():
            code += f"[{part}]"
        elif isinstance(module, nn.ModuleDict):
            code += f"[{part!r}]"
        elif part.isidentifier():
            code += f".{part}"
        else:
            return f"model.get_submodule({path!r})"
        module = module._modules[part]  # type: ignore[assignment]
    return code
