"""run_in_fp32 and fp32_modules: copies, compilers and others in the same place; names, patterns and errors."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanwatch
from nanwatch import fp32_modules, run_in_fp32
from support.narrow import HALF, Block, autocast, both, surroundings, three
from support.toys import names


def through_pickle(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def through_save(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_save])
@both
def test_a_copy_runs_in_float32_too(copied: Callable[[nn.Module], nn.Module], is_half: bool) -> None:
    """A copy computes the same with its own weights, and stays so when the original's handle is removed."""
    model, x, context = surroundings(is_half)
    handle = run_in_fp32(model[1])
    model.eval()
    with context():
        expected = model(x)
    twin = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    handle.remove()
    with context():
        assert torch.equal(twin(x), expected)
    assert twin[1].met == {torch.float32}
    run_in_fp32(twin[1]).remove()
    with context():
        assert torch.equal(twin(x), expected)


class Checkpointed(nn.Module):
    """Runs its part again in the backward, and has a weight of its own."""

    def __init__(self, part: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.part = part
        self.reentrant = reentrant
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        if self.reentrant is None:
            return self.part(x)
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
@both
def test_checkpointing(is_half: bool, is_inside: bool, reentrant: bool) -> None:
    """Inside a checkpoint or around one, the gradients are those without checkpointing."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = Checkpointed(part, reentrant)
    x = torch.randn(3, 4)
    if is_half:
        model, x = model.half(), x.half()
    plain = copy.deepcopy(model)
    plain.reentrant = None
    for one in (model, plain):
        run_in_fp32(one.part if is_inside else one)
        with nullcontext() if is_half else autocast():
            y = one(x)
        y.float().square().sum().backward()
    for got, wanted in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(got[1].grad, wanted[1].grad), got[0]


def test_a_module_shared_with_the_outside_is_half_there() -> None:
    """A layer that a float32 module and its half precision neighbour share is float32 in the one only."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.inner = nn.Sequential(self.layer)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(x), self.layer(x)

    model, x = Shared().half(), torch.randn(2, 4).half()
    expected = model.layer(x)
    plain = copy.deepcopy(model.layer).float()
    with run_in_fp32(model.inner, cast_output=False):
        inside, outside = model(x)
    assert torch.equal(inside, plain(x.float()))
    assert torch.equal(outside, expected)
    assert outside.dtype is HALF


@pytest.mark.parametrize("watch_first", [False, True])
@both
def test_a_watch_sees_the_same_calls(is_half: bool, watch_first: bool) -> None:
    """Watched before or after, each module has its frame, the model its result, and both come off again."""
    model, x, context = surroundings(is_half)
    model.eval()
    if watch_first:
        watch, handle = nanwatch.watch(model), run_in_fp32(model[1])
    else:
        handle, watch = run_in_fp32(model[1]), nanwatch.watch(model)
    with context():
        y = model(x)
    expected = [(0, "0"), (0, "1.first"), (0, "1.norm"), (0, "1.second"), (0, "1"), (0, "2"), (0, "")]
    assert names(watch) == expected
    records = {frame.name: {r.label: r.dtype for r in frame.records} for frame in watch.frames}
    assert records["1.first"]["input[0]"] == "float32"
    assert records["1"]["output"] == "float16"
    watch.stop()
    with context():
        assert torch.equal(model(x), y)
    handle.remove()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_another_forward_in_the_same_place() -> None:
    """A forward that somebody else put on the instance is called, comes back, and may wrap in its turn."""
    module = nn.Linear(2, 2)
    own = module.forward
    replaced = module.forward = lambda x: own(x) + 1
    handle = run_in_fp32(module)
    x = torch.ones(1, 2)
    assert torch.equal(module(x), own(x) + 1)
    handle.remove()
    assert module.__dict__["forward"] is replaced
    handle = run_in_fp32(module, cast_output=False)
    between = module.forward
    module.forward = lambda x: between(x) * 2
    with autocast():
        assert module(x.half()).dtype is torch.float32
        handle.remove()
        assert module(x.half()).dtype is HALF
    assert torch.equal(module(x), (own(x) + 1) * 2)


def test_the_signature_is_the_modules() -> None:
    """Libraries that ask which arguments a forward takes get its own answer."""
    block = Block()
    expected = inspect.signature(block.forward)
    run_in_fp32(block)
    assert inspect.signature(block.forward) == expected


def test_the_module_can_be_freed() -> None:
    """Neither the stand-in nor a handle that was removed keeps the module alive."""
    block = Block()
    reference = weakref.ref(block)
    handle = run_in_fp32(block)
    handle.remove()
    run_in_fp32(block)
    del block
    gc.collect()
    assert reference() is None


# Names, patterns and errors


def test_by_name() -> None:
    """A name means the module of that name in the model, also a second name of a shared one."""
    model = three()
    model.add_module("again", model[1])
    for name in ("1", "again"):
        with run_in_fp32(name, model), autocast():
            model[1](torch.randn(2, 4).half())
            assert model[1].met == {torch.float32}
        assert "forward" not in model[1].__dict__


def test_patterns_hold_all_that_match() -> None:
    """One handle for all modules that a pattern matches; containers without a call are passed over."""
    model = nn.Module()
    model.blocks = nn.ModuleList([three(), three()])
    with fp32_modules(model, ["blocks.*.1", "blocks.0.2"]) as handle:
        inside = {name for name, module in model.named_modules() if "forward" in module.__dict__}
        assert inside == {"blocks.0.1", "blocks.1.1", "blocks.0.2"}
    assert all("forward" not in module.__dict__ for module in model.modules())
    handle.remove()
    with fp32_modules(model, "blocks*"):
        assert "forward" not in model.blocks.__dict__
        assert "forward" in model.blocks[0].__dict__


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: run_in_fp32("1.frist", m), ValueError, r"no module '1.frist'; close names: 1.first"),
        (lambda m: run_in_fp32("zzz", m), ValueError, r"see model.named_modules\(\)"),
        (lambda m: run_in_fp32("1.first"), TypeError, r"needs the model too"),
        (lambda m: run_in_fp32(3), TypeError, r"needs a torch.nn.Module, got int"),
        (lambda m: run_in_fp32(nn.ModuleList([m])), ValueError, r"ModuleList is never called"),
        (lambda m: run_in_fp32(torch.jit.script(nn.ReLU())), TypeError, r"cannot reach into a"),
        (lambda m: fp32_modules(m, ["1", "2.wo*"]), ValueError, r"pattern '2.wo\*' matches no module"),
        (lambda m: fp32_modules(m, []), TypeError, r"patterns should be"),
        (lambda m: fp32_modules(m, [1]), TypeError, r"patterns should be"),
        (lambda m: fp32_modules("1", m), TypeError, r"needs a torch.nn.Module, got str"),
    ],
)
def test_wrong_arguments_are_named(
    call: Callable[[nn.Module], Any], error: type[Exception], message: str
) -> None:
    """An argument that means nothing raises, says what it was, and leaves the model alone."""
    model = three()
    with pytest.raises(error, match=message):
        call(model)
    assert all("forward" not in module.__dict__ for module in model.modules())
