"""`nanwatch.compare` between transformers' models and other implementations: planted faults, and equal pairs.

litgpt and timm lie in a folder that `make test-all` fills. Elsewhere their tests are skipped.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _engine_faults
import pytest
import torch
from _engine_faults import PLANTED, Planted, engine, inputs_of, reference
from _engine_models import GPT2, Llama
from torch import nn

import nanwatch
from nanwatch.equivalence.traces import compare_traces

pytest.importorskip("transformers")

# Engines outside of this repository, and the model of transformers that each is compared with.
ELSEWHERE = {"litgpt": "llama", "timm": "vit"}


def needs(name: str) -> None:
    """Skip the test where the engine is missing."""
    if name in ELSEWHERE:
        _engine_faults.make_importable()
        pytest.importorskip(name, exc_type=ImportError)


def cases(planted: list[Planted]) -> list[Any]:
    """Return the parameters of tests. Importing litgpt and timm takes seconds."""
    return [
        pytest.param(
            one,
            id=f"{one.engine}-{one.name}".replace(" ", "-"),
            marks=[pytest.mark.slow] if one.engine in ELSEWHERE else [],
        )
        for one in planted
    ]


@pytest.mark.parametrize("planted", cases(PLANTED))
def test_the_module_of_a_planted_fault_is_named(planted: Planted) -> None:
    """The innermost module of transformers' model in which the other implementation is at fault."""
    needs(planted.engine)
    name, model = engine(planted)
    found = nanwatch.compare(reference(name), model, inputs_of(name))
    assert found.equal is False
    assert found.first is not None, found.to_text()
    assert found.first.module_a == planted.right, found.to_text()


def ours(name: str) -> nn.Module:
    return (Llama if name == "llama" else GPT2)(reference(name)).eval()


def same(name: str) -> nn.Module:
    return copy.deepcopy(reference(name))


# A trace has the range alone of the input of o_proj, which a permutation of heads leaves as it is. The input of a block
# that takes hidden and residual apart is not known.
LESS_IN_A_TRACE = {"key groups": "model.layers.1.self_attn.o_proj", "norm order": "model"}
IN_A_TRACE = [one for one in PLANTED if one.engine not in ELSEWHERE]


def traced(model: nn.Module, x: torch.Tensor, path: Path) -> nanwatch.Trace:
    with nanwatch.watch(model, trace=path, sketches=1), torch.no_grad():
        model(x)
    return nanwatch.Trace.open(path)


@pytest.mark.parametrize("planted", cases(IN_A_TRACE))
def test_the_module_of_a_planted_fault_is_named_from_traces(planted: Planted, tmp_path: Path) -> None:
    """With a floor that a third trace measures, and without one."""
    pytest.importorskip("pyarrow")
    name, model = engine(planted)
    x = inputs_of(name)
    a, b = traced(same(name), x, tmp_path / "a.parquet"), traced(model, x, tmp_path / "b.parquet")
    precise = traced(same(name).double(), x, tmp_path / "c.parquet")
    for third in (None, precise):
        found = compare_traces(a, b, third)
        assert found.first is not None, found.to_text()
        assert found.first.module_a == LESS_IN_A_TRACE.get(planted.name, planted.right), found.to_text()


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_nothing_is_named_in_traces_of_equal_models(name: str, tmp_path: Path) -> None:
    """Pairs of two implementations, of two precisions, and of both."""
    pytest.importorskip("pyarrow")
    x = inputs_of(name)
    made = {
        "hf": same(name),
        "ours": ours(name),
        "bf16": same(name).bfloat16(),
        "both": ours(name).bfloat16(),
    }
    made |= {"f16": same(name).half(), "f64": same(name).double()}
    traces = {key: traced(model, x, tmp_path / f"{key}.parquet") for key, model in made.items()}
    for a, b in itertools.permutations(traces, 2):
        for third in (None, traces["f64"]):
            found = compare_traces(traces[a], traces[b], third)
            assert found.equal, f"{a} {b}: {found.to_text()}"


def eager(model: Any) -> nn.Module:
    model.set_attn_implementation("eager")
    return model


def autocast(model: nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(x)


def warmed_up(model: nn.Module, x: torch.Tensor) -> None:
    model(x[:1, :3])
    model(x)


def padded(model: nn.Module, x: torch.Tensor) -> None:
    """Call transformers' model with padding, which ours does not know."""
    mask = torch.ones_like(x)
    mask[1, 8:] = 0
    model(input_ids=x, attention_mask=mask)


MASK = torch.ones(2, 12, dtype=torch.bool)
MASK[1, 8:] = False
EQUAL: dict[str, Callable[[str], dict[str, Any]]] = {
    "float32": lambda name: {"b": ours(name)},
    "bfloat16": lambda name: {"a": same(name).bfloat16(), "b": ours(name).bfloat16()},
    "float16": lambda name: {"a": same(name).half(), "b": ours(name).half()},
    "float32 and bfloat16": lambda name: {"b": ours(name).bfloat16()},
    "bfloat16 and float32": lambda name: {"a": same(name).bfloat16(), "b": ours(name)},
    "float32 and float16": lambda name: {"b": ours(name).half()},
    "eager and sdpa": lambda name: {"a": eager(same(name)), "b": same(name)},
    "eager and sdpa in bfloat16": lambda name: {
        "a": eager(same(name).bfloat16()),
        "b": same(name).bfloat16(),
    },
    "autocast": lambda name: {"b": ours(name), "call_b": autocast},
    "warm-up": lambda name: {"b": ours(name), "call_b": warmed_up},
    "padding": lambda name: {"b": ours(name), "call_a": padded, "tokens": MASK},
    "one sample": lambda name: {"b": ours(name), "inputs": inputs_of(name)[:1]},
    "sketches": lambda name: {"b": ours(name), "most_bytes": 0},
}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("make", EQUAL.values(), ids=[name.replace(" ", "-") for name in EQUAL])
def test_equal_pairs_have_no_difference(make: Callable[[str], dict[str, Any]], name: str) -> None:
    """Rounding alone never reaches half of what is allowed, and nearly all that both sides have is compared."""
    pair = {"a": reference(name), "inputs": inputs_of(name), **make(name)}
    found = nanwatch.compare(pair.pop("a"), pair.pop("b"), pair.pop("inputs"), **pair)
    assert found.equal, found.to_text()
    assert len(found.modules) >= 26
    assert max(one.error / one.floor for one in found.modules if one.error is not None) < found.factor / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ELSEWHERE)
def test_nothing_is_named_in_another_engine(name: str) -> None:
    """With the weights of transformers' model."""
    needs(name)
    model = getattr(_engine_faults, name)()
    found = nanwatch.compare(reference(ELSEWHERE[name]), model, inputs_of(ELSEWHERE[name]))
    assert found.equal, found.to_text()


@pytest.mark.compile
def test_a_compiled_block_is_named() -> None:
    """Its parts do not show, so that the block is the module."""
    model = Llama(reference("llama"), "eps").eval()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    found = nanwatch.compare(reference("llama"), model, inputs_of("llama"))
    assert found.first is not None
    assert (found.first.module_a, found.first.module_b) == ("model.layers.1", "blocks.1")
