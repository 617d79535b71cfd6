"""run_in_fp32: what a module computes, and what its surroundings see of it."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch import run_in_fp32
from nanwatch.recording.walk import leaves
from support.narrow import HALF, NARROW, Block, Frozen, Pair, Plain, autocast, both, surroundings
from support.toys import Does

# Results of the module


@both
def test_the_whole_subtree_is_in_float32_until_it_is_removed(is_half: bool) -> None:
    """Weights, buffers, arguments and results inside are float32; the result equals a float32 copy's, given back.

    Afterwards the `__dict__`s, the state and, bit for bit, the results are as before.
    """
    model, x, context = surroundings(is_half)
    model.eval()
    plain = copy.deepcopy(model[1]).float()
    attributes = [{**module.__dict__, "met": None} for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with context():
        h, expected = model[0](x), model(x)
    with run_in_fp32(model[1]), context():
        y = model[1](h)
        assert all(value.dtype is state[name].dtype for name, value in model.state_dict().items())
    assert h.dtype is y.dtype is HALF
    assert model[1].met == {torch.float32}
    assert torch.equal(y, plain(h.float()).half())
    assert attributes == [{**module.__dict__, "met": None} for module in model.modules()]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with context():
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("dtype", NARROW)
def test_gradients_reach_the_half_weights(dtype: torch.dtype) -> None:
    """The gradient of a half weight is that of its float32 copy, rounded; an optimizer steps on the same objects."""
    block, x = Block().to(dtype), torch.randn(5, 4).to(dtype)
    plain = copy.deepcopy(block).float()
    own = list(block.parameters())
    optimizer = torch.optim.SGD(own, lr=0.5)
    with run_in_fp32(block):
        block(x).float().square().sum().backward()
    plain(x.float()).to(dtype).float().square().sum().backward()
    for parameter, reference in zip(own, plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, reference.grad.to(dtype))
    before = own[0].detach().clone()
    optimizer.step()
    assert not torch.equal(before, block.first.weight)
    assert all(a is b for a, b in zip(own, block.parameters(), strict=True))


def test_autocast_is_off_for_every_device() -> None:
    """Inside a call neither the CPU's nor another device's autocast is on; after it both are as before."""
    kinds = ("cpu", "cuda", "xpu")
    module = Does(lambda x: [torch.is_autocast_enabled(kind) for kind in kinds])
    run_in_fp32(module)
    torch.set_autocast_enabled("cuda", True)
    try:
        with autocast():
            assert module(torch.ones(1)) == [False, False, False]
            assert [torch.is_autocast_enabled(kind) for kind in kinds] == [True, True, False]
    finally:
        torch.set_autocast_enabled("cuda", False)


def containers() -> Iterator[Any]:
    from transformers.modeling_outputs import BaseModelOutput

    x = torch.ones(2, dtype=HALF)
    yield [x, "a", None]
    yield Pair(x, 2)
    yield OrderedDict(a=x)
    yield Frozen(x)
    yield BaseModelOutput(last_hidden_state=x, hidden_states=(x, x))
    yield {"a": (Frozen(x), [Pair(x, {"b": x})])}
    yield x.max(dim=0)
    yield nn.utils.rnn.PackedSequence(x, torch.tensor([2]))


def tensors(value: Any) -> list[Tensor]:
    return [x for _, x in leaves(value, "") if isinstance(x, Tensor)]


def dtypes(value: Any) -> list[torch.dtype]:
    return [x.dtype for x in tensors(value)]


@pytest.mark.parametrize("given", list(containers()), ids=lambda given: type(given).__name__)
def test_containers_are_walked(given: Any) -> None:
    """Half tensors in containers come as float32, in a container of the same type; the caller's stays as it was."""
    met = []
    module = Does(lambda *args, **kwargs: met.append((*args, *kwargs.values())) or args[0])
    before = dtypes(given)
    with run_in_fp32(module):
        result = module(given, named=given)
    wide = [torch.float32 if dtype is HALF else dtype for dtype in before]
    for inside in met[0]:
        assert type(inside) is type(given)
        assert dtypes(inside) == wide
    assert type(result) is type(given)
    assert dtypes(given) == before
    # A tensor of no dimension is left wide.
    expected = [w if x.ndim == 0 else b for x, w, b in zip(tensors(given), wide, before, strict=True)]
    assert dtypes(result) == expected


def test_what_holds_no_half_tensor_is_the_same_object() -> None:
    cache: dict[str, list[Tensor]] = {"keys": []}
    given = [cache, (torch.ones(2), 1), object(), Plain(torch.ones(2)), MappingProxyType({"a": 1})]
    module = Does(lambda x, *others: (cache["keys"].append(x), others)[1])
    with run_in_fp32(module, cast_output=False):
        result = module(torch.ones(2, dtype=HALF), *given)
    assert all(a is b for a, b in zip(result, given, strict=True))
    assert [x.dtype for x in cache["keys"]] == [torch.float32]


@pytest.mark.parametrize(
    ("module", "given", "is_autocast", "expected"),
    [
        (nn.Linear(2, 2).half(), HALF, False, HALF),
        (nn.Linear(2, 2), HALF, True, HALF),
        (nn.Linear(2, 2), torch.float32, True, torch.float32),
        (nn.LayerNorm(2), HALF, True, torch.float32),
        (nn.Embedding(3, 2).half(), torch.int64, False, HALF),
        (nn.Embedding(3, 2), torch.int64, True, torch.float32),
        (nn.Embedding(3, 2).double(), torch.int64, False, torch.float64),
    ],
)
def test_the_dtype_of_the_result(module, given, is_autocast, expected):
    """The first floating-point argument's, that of the weights without one; float32 where that was given."""
    x = torch.ones(2, 2).to(given)
    with run_in_fp32(module), autocast() if is_autocast else nullcontext():
        assert module(x).dtype is expected
    with run_in_fp32(module, cast_output=False), autocast() if is_autocast else nullcontext():
        assert module(x).dtype is (torch.float64 if expected is torch.float64 else torch.float32)


@both
def test_a_parent_in_float32_takes_its_childs_result_as_it_is(is_half: bool) -> None:
    """A child's own float32 inside a parent's changes nothing, whichever came first and whichever goes first."""
    model, x, context = surroundings(is_half)
    with run_in_fp32(model[1]), context():
        expected = model(x)
    for order in ((model[1], model[1].first), (model[1].first, model[1])):
        handles = [run_in_fp32(module) for module in order]
        with context():
            assert torch.equal(model(x), expected)
        handles[0].remove()
        with context():
            model(x)
        handles[1].remove()
        assert all("forward" not in module.__dict__ for module in model.modules())


def test_an_exception_leaves_the_weights() -> None:
    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("meant")

    module = nn.Sequential(nn.Linear(2, 2), Does(fail)).half()
    own = list(module.parameters())
    run_in_fp32(module)
    with autocast(), pytest.raises(RuntimeError, match="meant"):
        module(torch.ones(1, 2))
    assert all(a is b for a, b in zip(own, module.parameters(), strict=True))


def test_tied_weights_stay_tied() -> None:
    """Two modules with one weight see one float32 copy, and the weight gets the sum of both gradients."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).half()
    module[1].weight = module[0].weight
    seen = []
    inner = Does(lambda x: (seen.append(module[0].weight is module[1].weight), x)[1])
    module.append(inner)
    plain = copy.deepcopy(module).float()
    x = torch.ones(1, 2, dtype=HALF)
    with run_in_fp32(module):
        module(x).sum().backward()
    plain[:2](x.float()).sum().backward()
    assert seen == [True]
    assert torch.equal(module[0].weight.grad, plain[0].weight.grad.half())


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_running_statistics_are_kept(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    norm = nn.BatchNorm1d(4).half()
    plain = copy.deepcopy(norm).float()
    x = torch.randn(8, 4).half()
    buffer = norm.running_mean
    with run_in_fp32(norm), mode():
        norm(x)
    plain(x.float())
    assert norm.running_mean is buffer
    assert torch.equal(norm.running_mean, plain.running_mean.half())
    assert norm.num_batches_tracked == 1
