"""`nanwatch.compare` on toys: matching, kinds of difference, thin evidence, and that nothing is left behind."""

import copy
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.compare.models import compare_traces
from nanwatch.trace.comparison import Comparison
from nanwatch.trace.trace_file import Trace
from support.toys import Does
from support.watching import watch


def with_step(function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    return nn.Sequential(nn.Identity(), Does(function), nn.Identity())


def first(result: Comparison) -> tuple[str, str]:
    """The first module that differs, in A, and what the difference looks like."""
    assert result.equal is False
    assert result.first is not None, result.to_text()
    return result.first.module_a, "; ".join(result.words("Looks like"))


X = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: 3 * x, "a scale: B is 3 times A"),
        (lambda x: x * (1 + (torch.arange(16) // 2 == 2)), "2 of 16 columns only, from 4 to 5"),
        (lambda x: torch.cat([x[:, :-1], 2 * x[:, -1:]], 1), "token 7 of 8 only"),
        (lambda x: torch.cat([x[:, :1], x[:, 1:] ** 2], 1), "all tokens but the first"),
        (lambda x: x / 0, "non-finite numbers on one side only"),
    ],
)
def test_the_kind_of_a_difference_is_named(function: Callable[[Tensor], Tensor], words: str) -> None:
    name, likely = first(nanwatch.compare(with_step(lambda x: x * 1), with_step(function), X))
    assert name == "1"
    assert words in likely


class Projections(nn.Module):
    """Three projections of one input, apart or in one layer, in an order of its own, with a fault in the second."""

    def __init__(
        self, order: list[int] | None = None, fault: float = 0.0, *, is_pruned: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Linear(16, width) for width in (16, 8, 8)]
        for part in parts:
            part.weight.data[::2] *= not is_pruned
        self.parts = nn.ModuleList(parts if order is None else [nn.Linear(16, 32)])
        self.order = order
        if order is not None:
            whole = self.parts[0]
            whole.weight = nn.Parameter(torch.cat([parts[i].weight for i in order]))
            whole.bias = nn.Parameter(torch.cat([parts[i].bias + fault * (i == 1) for i in order]))

    def forward(self, x: Tensor) -> Tensor:
        if self.order is None:
            return self.parts[0](x) + torch.cat([self.parts[1](x), self.parts[2](x)], -1)
        outputs = self.parts[0](x).split([16 if i == 0 else 8 for i in self.order], -1)
        q, k, v = (outputs[self.order.index(i)] for i in range(3))
        return q + torch.cat([k, v], -1)


@pytest.mark.parametrize(("order", "is_pruned"), [([0, 1, 2], False), ([2, 0, 1], True)])
def test_the_part_of_a_fused_projection_is_named(order: list[int], is_pruned: bool) -> None:
    """Whatever order the columns have, where half of them are zero, and on whichever side the projection is fused."""
    apart, whole = Projections(is_pruned=is_pruned), Projections(order, fault=1e-3, is_pruned=is_pruned)
    parts = ", ".join(f"parts.{i}" for i in order)
    for sides, name in (((apart, whole), parts), ((whole, apart), "parts.0")):
        named, likely = first(nanwatch.compare(*sides, X))
        assert (named, likely.partition(";")[0]) == (name, "in parts.1 only")
    assert not nanwatch.compare(apart, Projections(order, is_pruned=is_pruned), X).remarks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_differ_in_a_fused_weight_leave_it_matched(dtype: torch.dtype) -> None:
    """Three of eight rows of the second part are a tenth larger, which is more than rounding of the whole."""
    whole = Projections([0, 1, 2])
    whole.parts[0].weight.data[17:20] *= 1.1
    result = nanwatch.compare(Projections().to(dtype), whole.to(dtype), X.to(dtype))
    assert first(result)[1].startswith("in parts.1 only")


class Scaled(nn.Module):
    """Norm whose weight has another name, as in ports."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.scale, self.shift = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.scale - 1, self.shift)


def test_a_norm_of_another_name_and_class_is_matched_by_its_shapes() -> None:
    """Its outputs are far apart: the port forgot that the weight is one more than what it stores."""
    a = nn.ModuleDict({"up": nn.Linear(16, 16), "norm": nn.LayerNorm(16), "down": nn.Linear(16, 16)})
    b = nn.ModuleDict({"w1": a["up"], "n1": Scaled(a["norm"]), "w2": a["down"]})
    for model in (a, b):
        model.forward = nn.Sequential(*model.values()).forward
    assert first(nanwatch.compare(a, b, X))[0] == "norm"
    a, b = nn.Sequential(OrderedDict(act=nn.Tanh())), nn.Sequential(OrderedDict(step=Does(torch.exp)))
    assert len(nanwatch.compare(a, b, X).modules) == 1  # leaves are not matched as containers are


def test_a_difference_that_is_undone_is_a_convention() -> None:
    """A factor that moved from one side of a module to another is a remark, and no fault."""

    def folded(factor: float) -> nn.Module:
        inner = nn.Sequential(Does(lambda x: x * factor), Does(lambda x: x / factor))
        return nn.Sequential(inner, nn.Linear(16, 16))

    a, b = folded(1.0), folded(2.0)
    b[1] = copy.deepcopy(a[1])
    a[1].steps, b[1].steps = 1, 2  # no eps
    result = nanwatch.compare(a, b, X)
    assert result.equal
    assert result.remarks == (
        "the output of 0.0 differs, which is gone at the output of 0",
        "the input of 0.1 differs, which is gone at the output of 0.1",
    )


def test_tokens_that_do_not_count_may_differ() -> None:
    """By a mask, in tensors of (batch, length, ...), and where one side has packed them, after a warm-up."""
    mask = torch.arange(8) < torch.tensor([[8], [5]])
    a, b = with_step(lambda x: x * 1), with_step(lambda x: torch.where(mask[..., None], x, 9 * x))
    assert nanwatch.compare(a, b, X).equal is False
    assert nanwatch.compare(a, b, X, tokens=mask).equal
    packed = nanwatch.compare(a, a, X, tokens=mask, call_b=lambda m, x: (m[0](x[:1]), m(x[mask])))
    assert (packed.equal, len(packed.modules)) == (True, 4)


class Stateful(nn.Module):
    """Model whose forward draws, and writes deep inside its attributes."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.random, self.scale = nn.Linear(16, 4), random.Random(0), scale
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout()
        self.layers: list[dict[str, Any]] = [{"cache": torch.zeros(4), "lengths": [0]}]
        self.register_buffer("expanded", torch.ones(1).expand(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.layers[0]["lengths"].append(8)
        x = self.linear(self.dropout(self.norm(x))) * self.layers[0]["cache"].add_(1)
        return x * self.expanded * self.random.random() * self.scale


def test_models_and_random_state_are_left_alone() -> None:
    """Statistics, modes, caches, gradients and random states: a write changes neither a later run nor the model."""

    def call(model: nn.Module, x: Tensor) -> None:
        with torch.enable_grad():
            model(x).sum().backward()

    a, b = Stateful(1.0), Stateful(1.001)
    b.load_state_dict(a.state_dict())
    a.linear.weight.grad = torch.ones(4, 16)
    saved, state, x = copy.deepcopy(a.state_dict()), torch.get_rng_state(), X.clone().requires_grad_()
    result = nanwatch.compare(a, b, x, call_a=call, call_b=call)
    assert result.first.input_error == 0.0
    for model in (a, b):
        torch.testing.assert_close(dict(model.state_dict()), dict(saved), rtol=0, atol=0)
        cache, lengths = model.layers[0].values()
        kept = cache.tolist(), cache._version, lengths, model.random.getstate(), model.training
        assert kept == ([0] * 4, 0, [0], random.Random(0).getstate(), True)
    assert torch.equal(a.linear.weight.grad, torch.ones(4, 16))
    assert (b.linear.weight.grad, x.grad) == (None, None)
    assert torch.equal(state, torch.get_rng_state())


def test_a_model_that_knows_one_precision_has_the_floor_of_the_other() -> None:
    """And where neither runs in another, a guess that the result owns up to."""

    def picky(x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise RuntimeError("float32 only")
        return x * 1

    easy, hard = with_step(lambda x: x * 1), with_step(picky)
    result = nanwatch.compare(easy, hard, X)
    assert result.equal
    assert result.words("Noise")[0] == "rounding error of A, run in float32 and again in float64"
    assert result.remarks == ("B did not run in float64: RuntimeError: float32 only",)
    assert nanwatch.compare(hard, hard, X).words("Noise")[0] == "not measured, assumed to be 4 eps of float32"


def test_outputs_that_are_further_apart_than_rounding_are_never_equal() -> None:
    """Though what measures the noise is as far off, here by what both add in float32."""
    a, b = (with_step(lambda x, more=more: x + more * (x.dtype is torch.float32)) for more in (0.01, 0.02))
    result = nanwatch.compare(a, b, X)
    assert (result.equal, result.first) == (False, None)
    assert "what measured the noise is as far off" in result.headline


def test_bad_use_is_explained() -> None:
    for model_b, options, words in (
        ("model", {}, "model_b should be a torch.nn.Module, got str"),
        (nn.Tanh(), {"factor": 1.0}, "factor should be above 1"),
        (nn.Tanh(), {"most_bytes": 1000}, "take more than most_bytes=1,000; pass fewer tokens"),
        (nn.Tanh(), {"call_b": lambda *_: None}, "no module of the Tanh was called: see call_a and"),
        (with_step(lambda x: x[9]), {"call_b": lambda *x: pytest.raises(IndexError, *x)}, "no module of"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            nanwatch.compare(nn.Tanh(), model_b, X, **options)


def block(function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    return nn.Sequential(OrderedDict(linear=nn.Linear(16, 16), act=Does(function)))


def tan_is_cos(graph: torch.fx.GraphModule, inputs: object) -> Any:
    """Compile, and take each tangent for a cosine."""
    for node in graph.graph.nodes:
        if getattr(node.target, "__name__", "") == "tan":
            node.target = torch.cos
    graph.recompile()
    return graph.forward


@pytest.mark.compile
@pytest.mark.parametrize("in_place", [False, True])
def test_a_module_that_is_compiled_wrongly_is_named(*, in_place: bool) -> None:
    """As far as it was compiled by itself. What runs is the compiled model, and it stays compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(*map(block, (torch.sin, torch.tan, torch.sin)))

    def compared(*paths: str) -> Comparison:
        torch._dynamo.reset()
        model_b = copy.deepcopy(model)
        for path in paths:
            module = model_b.get_submodule(path)
            if in_place:
                module.compile(backend=tan_is_cos)
                continue
            compiled: Any = torch.compile(module, backend=tan_is_cos)
            if not path:
                return nanwatch.compare(model, compiled, X)
            holder, _, name = path.rpartition(".")
            setattr(model_b.get_submodule(holder), name, compiled)
        return nanwatch.compare(model, model_b, X)

    whole = compared("")
    assert first(whole)[0] == ""
    assert "the root module of B is compiled" in whole.remarks[-1]
    assert first(compared("0.act", "1.act", "2.act"))[0] == "1.act"
    assert compared("0", "2").equal


class Shared(nn.Module):
    """Three layers, each behind one shared norm, of which one call may be left out."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.x, self.y, self.z = (nn.Linear(8, 8) for _ in range(3))
        self.norm, self.skips = nn.LayerNorm(8), skips

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.x(x))
        y = self.y(x)
        return self.norm(self.z(x if self.skips else x + 0 * self.norm(y)))


def test_a_call_of_a_shared_module_that_one_side_lacks_moves_no_other() -> None:
    """The third call of the norm is matched with the second of the other side, by the layers around it."""
    result = nanwatch.compare(Shared(skips=False), Shared(skips=True), torch.randn(2, 8))
    assert result.equal, result.to_text()
    assert "A made 7 calls, B 6" in str(result)
    assert [place.error for place in result.modules if place.module_a == "norm"] == [0, 0]
    a, b = with_step(torch.tanh), with_step(torch.tanh)
    b.forward = lambda x: b[2](3 * b[0](x))  # the code of a module around which A has another
    assert first(nanwatch.compare(nn.Sequential(a), b, X))[0] == "0"


# 16-bit models: what rounding hides, what it explains, and parameters that no output shows.


def curved(share: float) -> nn.Sequential:
    """Layers around a step with a small term that may be left out."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Does(lambda x: x + share * x * x), nn.Linear(16, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_difference_that_rounding_hides_is_told_with_its_module(dtype: torch.dtype) -> None:
    """The error of float32 copies is that of the models before the cast."""
    share = 10 * torch.finfo(dtype).eps / 16
    result = nanwatch.compare(curved(0.0).to(dtype), curved(share).to(dtype), X.to(dtype))
    assert first(result)[0] == "1"
    words = f"Equal in {str(dtype)[6:]}; the float32 copies differ first in 1 (Does), 0.00"
    assert result.headline.startswith(words)
    exact = nanwatch.compare(curved(0.0), curved(share), X)
    assert result.first.error == pytest.approx(exact.first.error, rel=0.05)


class Turned(nn.Module):
    """Product with frequencies that are kept in a buffer, which a cast rounds, or computed."""

    def __init__(self, base: float, *, is_kept: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.base, self.is_kept = base, is_kept
        if is_kept:
            self.register_buffer("frequencies", self.computed())

    def computed(self) -> Tensor:
        return self.base ** -(torch.arange(16) / 16)

    def forward(self, x: Tensor) -> Tensor:
        frequencies = self.frequencies if self.is_kept else self.computed()
        return (self.layer(x) * torch.cos(torch.arange(8.0)[:, None] * frequencies.float())).to(x.dtype)


def test_a_buffer_that_the_cast_rounded_is_no_difference() -> None:
    """Though the float32 copies have it rounded too. A buffer that is further off is one, also in a port's class."""

    def compared(base: float, kind: type[Turned] = Turned, *, is_kept: bool = True) -> Comparison:
        models = []
        for part in (Turned(100.0, is_kept=True), kind(base, is_kept=is_kept)):
            torch.manual_seed(0)
            part.layer.reset_parameters()
            models.append(nn.Sequential(nn.Linear(16, 16), part, nn.Linear(16, 16)).bfloat16())
        return nanwatch.compare(*models, X.bfloat16())

    assert compared(100.0, is_kept=False).equal
    assert first(compared(200.0, is_kept=False))[0] == "1"
    assert compared(102.0).headline.startswith("Equal in bfloat16; the float32 copies differ first in 1 ")
    name, likely = first(compared(105.0, type("Ported", (Turned,), {})))
    assert name == "1"
    assert "its frequencies is " in likely


class Counting(nn.Linear):
    """Layer that no copy can be made of, around a part, with a buffer that a call writes."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.lock, self.part = threading.Lock(), nn.Tanh()
        self.register_buffer("usage", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.usage.add_(x.abs().sum())
        return self.part(super().forward(x))


def test_a_buffer_that_a_run_wrote_is_no_difference() -> None:
    """A model that cannot be copied has no run in another precision, and its buffers are put back."""
    a, b = Counting(), Counting()
    b.load_state_dict(a.state_dict())
    result = nanwatch.compare(a, b, X)
    assert (result.equal, len(result.remarks)) == (True, 2)


def test_a_buffer_of_another_precision_is_rounding() -> None:
    """The least number of float32 is -inf in bfloat16."""
    a = nn.Linear(16, 16)
    a.register_buffer("mask", torch.full((2, 2), torch.finfo(torch.float32).min).triu(1))
    assert nanwatch.compare(a, copy.deepcopy(a).bfloat16(), X, call_b=lambda b, x: b(x.bfloat16())).equal


class Offset(nn.Module):
    """Product with a weight that is kept less an offset."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset, self.weight = offset, nn.Parameter(torch.full((16,), 2.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight + self.offset)


def test_a_weight_that_another_setting_makes_up_for_is_no_difference() -> None:
    """Nor is an eps that a container keeps, as of its configuration."""
    a, b = (nn.Sequential(Offset(offset)) for offset in (0.0, 1.0))
    a.eps, b.eps = 1e-5, 1e-6
    assert nanwatch.compare(a, b, X).equal


def embedded() -> nn.Sequential:
    torch.manual_seed(0)
    linear = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)
    return nn.Sequential(nn.Embedding(9, 16), *linear, nn.LayerNorm(16), nn.BatchNorm1d(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("change", "module", "words"),
    [
        (lambda model: model[0].weight.data[7].add_(1), "0", "its weight is 0.3"),
        (lambda model: model[1].weight.data[3, 4].mul_(1.01), "1", "its weight is "),
        (lambda model: setattr(model[1], "bias", None), "1", "only A has a bias"),
        # The norm after it takes the scale out again, up to its eps.
        (lambda model: [x.data.mul_(2) for x in model[3].parameters()], "3", "its weight is 1 apart"),
        (lambda model: setattr(model[4], "eps", 1e-9), "4", "eps is 1e-05 in A and 1e-09 in B"),
        # Running statistics, which a model in training does not read. No rounding makes them non-finite.
        (lambda model: model[5].running_mean[3:].fill_(nan), "5", "its running_mean is "),
        (lambda model: model[5].running_mean[3:].fill_(inf), "5", "its running_mean is "),
    ],
)
def test_a_leaf_with_another_parameter_is_never_equal(change, module, words, dtype):
    a = embedded().to(dtype)
    b = copy.deepcopy(a)
    change(b)
    name, likely = first(nanwatch.compare(a, b, torch.tensor([[0, 1, 2, 3]])))
    assert name == module
    assert words in likely


# Two traces: what is matched and named from sketches and ranges alone.


def blocks(names: str) -> nn.Sequential:
    torch.manual_seed(0)
    parts = ((nn.LayerNorm(16), nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16)) for _ in range(3))
    layers = [OrderedDict(zip(names.split(), part, strict=True)) for part in parts]
    return nn.Sequential(*map(nn.Sequential, layers))


def test_modules_of_two_traces_are_matched(tmp_path: Path) -> None:
    """By order and class, though their names differ, and containers by what they hold; the fault is in one of them."""
    pytest.importorskip("pyarrow")

    def trace(name: str, model: nn.Module) -> Trace:
        with watch(model, trace=tmp_path / f"{name}.parquet", sketches=1), torch.no_grad():
            model(X)
        return Trace.open(tmp_path / f"{name}.parquet")

    port = blocks("pre wide tanh narrow")
    a = trace("a", blocks("norm up act down"))
    names = [(place.module_a, place.module_b) for place in compare_traces(a, trace("b", port)).modules]
    assert {("2.norm", "2.pre"), ("2.down", "2.narrow"), ("1", "1")} <= {*names}
    assert len(names) == 16
    port[1].narrow.bias.data[::2] += 0.1
    result = compare_traces(a, trace("c", port))
    assert (result.first.module_a, result.first.module_b) == ("1.down", "1.narrow")
    with pytest.raises(ValueError, match="has no sketches of batch 7"):
        compare_traces(a, a, batches=(0, 7))
