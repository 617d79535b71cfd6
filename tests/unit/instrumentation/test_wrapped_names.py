"""Wrappers are no part of a module's name, and each name leads back to one module."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from nanwatch.instrumentation.wrapped_names import find_module, named_modules, unwrapped
from support.toys import Scale, names
from support.watching import watch

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": lambda module: torch.compile(module, backend="eager"),  # type: ignore[dict-item]
    "DataParallel": nn.DataParallel,
    "checkpoint": checkpoint_wrapper,
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
}


def plain_tree(shape: Any) -> nn.Module:
    """A tree of containers: a list of subtrees, each with a flag for each wrapper around it."""
    children = OrderedDict(
        (("module", "a", "b", "0")[i], plain_tree(child)) for i, (child, _) in enumerate(shape)
    )
    return nn.Sequential(children) if children else nn.Linear(1, 1)


def wrap_tree(module: nn.Module, shape: Any) -> nn.Module:
    """Put the wrappers in, from the leaves up; the modules stay the same objects."""
    for key, (child, wrappers) in zip(list(module._modules), shape, strict=True):
        held = wrap_tree(module._modules[key], child)  # type: ignore[arg-type]
        for wrapper in wrappers:
            held = WRAPPERS[wrapper](held)
        module._modules[key] = held
    return module


_flags = st.lists(st.sampled_from(["compile", "DataParallel", "checkpoint"]), max_size=2, unique=True)
_shapes = st.recursive(
    st.just([]), lambda inner: st.lists(st.tuples(inner, _flags), max_size=3), max_leaves=6
)


@given(shape=_shapes, around=_flags)
def test_names_are_those_without_wrappers(shape: Any, around: list[str]) -> None:
    """For any tree with wrappers anywhere: the plain tree's names, none given twice, each leading to its module."""
    plain = plain_tree(shape)
    expected = {module: name for name, module in plain.named_modules()}
    model = wrap_tree(plain, shape)
    for wrapper in around:
        model = WRAPPERS[wrapper](model)
    found = list(named_modules(model))
    assert {one.module: one.name for one in found if one.module in expected} == expected
    assert [one.module for one in found] == list(model.modules())
    for one in found:
        assert model.get_submodule(one.path) is one.module
        if one.module in expected:
            assert (led := find_module(model, one.name)) is not None
            assert led.module is one.module
    object.__setattr__(plain, "unregistered", Scale())
    assert find_module(model, "unregistered") is None
    wrappers = [one.name for one in found if one.module not in expected]
    assert all(name.endswith(")") for name in wrappers)
    assert unwrapped(model) is plain


@pytest.mark.parametrize("wrapper", ["DataParallel", "checkpoint"])
def test_a_module_in_two_places_is_found_at_both(wrapper: str) -> None:
    """Also inside a wrapper, whose key is no part of the name."""
    tied = Scale()
    model = nn.Sequential(WRAPPERS[wrapper](nn.Sequential(tied, nn.Sequential(Scale(), tied))))
    for name in ("0.0", "0.1.1"):
        assert (named := find_module(model, name)) is not None
        assert (named.name, named.module) == ("0.0", tied)
    assert find_module(model, "0.1.2") is None


@pytest.mark.parametrize("wrapper", ["DataParallel", "checkpoint"])
def test_a_module_wrapped_while_it_is_watched_keeps_its_name(wrapper: str) -> None:
    """A wrapper put around a layer later, and a layer put inside a wrapper later."""
    model = nn.Sequential(Scale(), nn.Sequential(Scale()))
    with watch(model) as w:
        model[0] = WRAPPERS[wrapper](model[0])
        model[1] = WRAPPERS[wrapper](nn.Sequential(Scale()))
        unwrapped(model[1]).append(Scale())  # type: ignore[operator]
        model(torch.ones(1))
    assert [name for _, name in names(w)] == ["0", "1.0", "1.1", "1", ""]
