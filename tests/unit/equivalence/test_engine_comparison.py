"""Comparison of a trainer and a packed engine with fused projections, written by hand, in chunks and token by token."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.equivalence.engine_comparison import (
    EngineComparison,
    compare_runs,
)
from nanwatch.equivalence.packed import STRIDE, PackedRun, Places
from nanwatch.equivalence.recorded_run import RecordedRun, fingerprints

WORDS, WIDTH = 19, 8
TOKENS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8]]
# Parts of requests in each step: two chunks of the first prompt, then two sampled tokens of each.
STEPS = [[(0, 0, 3)], [(0, 3, 2), (1, 0, 3)], [(0, 5, 1), (1, 3, 1)]]
Plant = Callable[["Engine"], None]


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.q(x)) * self.k(x) + self.v(x)
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), Mix()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.mix(self.norm(x))
        return found


class Trainer(nn.Module):
    """Reads a batch of whole requests."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for one in self.layers:
            x = one(x)
        found: Tensor = self.lm_head(x)
        return found


class FusedMix(nn.Module):
    def __init__(self, other: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.qkv.output_sizes = [WIDTH] * 3  # type: ignore[assignment]
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([other.q.weight, other.k.weight, other.v.weight]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        found: Tensor = torch.tanh(q) * k + v
        return found


class FusedBlock(nn.Module):
    """Passes hidden and residual apart."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), FusedMix(other.mix)

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else hidden + residual
        return self.mix(self.norm(residual)), residual


class Engine(nn.Module):
    """Reads packed tokens; its head is called by a part that is given it."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(FusedBlock(one) for one in other.layers)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.words.load_state_dict(other.words.state_dict())
        self.lm_head.load_state_dict(other.lm_head.state_dict())

    def forward(self, ids: Tensor) -> Tensor:
        hidden, residual = self.words(ids), None
        for one in self.layers:
            hidden, residual = one(hidden, residual)
        found: Tensor = hidden + residual
        return found


def read(model: nn.Module, tmp_path: Path) -> RecordedRun:
    """Return the run of a trainer, which reads each request at once."""
    run = PackedRun(1 << 20, lead=1)
    with torch.no_grad(), run.recording(model):
        for number, tokens in enumerate(TOKENS):
            run.step_begins(partial(Places.of, [(number, 0, len(tokens) - 1)]))
            model(torch.tensor([tokens[:-1]]))
            run.step_ended()
    return filed(RecordedRun("trainer 1", prints=fingerprints(model), settings={"eps": 1e-5}), run, tmp_path)


def serve(model: Any, tmp_path: Path) -> RecordedRun:
    """Return the run of an engine, which reads prompts in chunks and answers token by token."""
    run, found = (
        PackedRun(1 << 20),
        RecordedRun("engine 2", prints=fingerprints(model), settings={"eps": 1e-5}),
    )
    logs: dict[int, Tensor] = {}
    with torch.no_grad(), run.recording(model):
        for parts in STEPS:
            places = Places.of(parts)
            run.step_begins(lambda: places)  # noqa: B023
            hidden = model(
                torch.tensor([TOKENS[r][i] for r, first, n in parts for i in range(first, first + n)])
            )
            ends = torch.tensor([n for _, _, n in parts]).cumsum(0) - 1
            logs |= zip(places.last.tolist(), model.lm_head(hidden[ends]).log_softmax(-1), strict=True)
            run.step_ended()
    answers = ((0, (5, 6)), (1, (3, 4)))
    found.logprobs = [[float(logs[r * STRIDE + at - 1][TOKENS[r][at]]) for at in row] for r, row in answers]
    return filed(found, run, tmp_path)


def filed(found: RecordedRun, run: PackedRun, tmp_path: Path) -> RecordedRun:
    found.tokens, found.sampled = TOKENS, [2, 2]
    torch.save(found.take_calls(run), tmp_path / "run.pt")
    loaded: RecordedRun = torch.load(tmp_path / "run.pt", weights_only=False)
    return loaded


def compared(
    tmp_path: Path,
    plant: Plant = lambda _: None,
    change: Callable[[RecordedRun], None] = lambda _: None,
) -> EngineComparison:
    torch.manual_seed(0)
    trainer = Trainer()
    engine = Engine(trainer)
    plant(engine)
    b = serve(engine, tmp_path)
    change(b)
    runs = {torch.float32: read(trainer, tmp_path), torch.float64: read(trainer.double(), tmp_path)}
    return compare_runs((runs[torch.float32], b, lambda dtype: runs[dtype]))


def layer(engine: Engine) -> Any:
    return engine.layers[1]


def test_a_trainer_and_an_engine_of_the_same_weights_are_equal(tmp_path: Path) -> None:
    """The fused projection, the layers and the logits are compared, and the sampled tokens have no gap."""
    found = compared(tmp_path)
    assert found.equal is True, found.to_text()
    assert {"layers.0.mix.q, layers.0.mix.k, layers.0.mix.v", "layers.2", "lm_head", ""} <= {
        one.module_a for one in found.comparison.modules
    }
    assert found.stale == found.settings == ()
    assert found.gap is not None
    assert (found.gap.tokens, found.gap.is_exact) == (4, True)
    assert found.gap.largest < 1e-5
    assert found.gap.effective == pytest.approx(1.0)
    assert "after layer 2" in found.depth


def k_and_v(engine: Engine) -> None:
    weight = layer(engine).mix.qkv.weight
    with torch.no_grad():
        weight[WIDTH : 2 * WIDTH, 0] += 0.1


def eps(engine: Engine) -> None:
    layer(engine).norm.eps = 0.1


def residual(engine: Engine) -> None:
    block, forward = layer(engine), layer(engine).forward
    block.forward = lambda hidden, residual: (lambda out: (out[0] * 1.1, out[1]))(forward(hidden, residual))


@pytest.mark.parametrize(
    ("plant", "right"),
    [
        (k_and_v, "layers.1.mix.q, layers.1.mix.k, layers.1.mix.v"),
        (eps, "layers.1.norm"),
        (residual, "layers.1"),
    ],
)
def test_the_module_of_a_fault_is_named(plant: Plant, right: str, tmp_path: Path) -> None:
    """In a fused projection also the part; its weight is stale."""
    found = compared(tmp_path, plant)
    assert found.equal is False
    assert found.first is not None
    assert found.first.module_a == right, found.to_text()
    if plant is k_and_v:
        assert "in layers.1.mix.k only" in found.comparison.likely
        assert found.stale == ("layers.1.mix.qkv.weight (part 1 of 3)",)
    assert found.tokens.startswith("10 of 10, all")


def test_a_fault_in_decode_is_told_from_one_in_prefill(tmp_path: Path) -> None:
    """Only rows of the last step differ, in both requests."""

    def plant(engine: Engine) -> None:
        norm, forward = layer(engine).norm, layer(engine).norm.forward
        norm.forward = lambda x: forward(x) + 0.1 * (len(x) == 2)

    found = compared(tmp_path, plant)
    assert found.first is not None
    assert found.first.module_a == "layers.1.norm"
    assert "in decode only" in found.tokens
    assert found.first.tokens[0] < 1e-6 < found.first.tokens[-1]


def test_a_sampler_that_reports_other_probabilities_is_told(tmp_path: Path) -> None:
    """The logits agree, so no module is named."""

    def change(run: RecordedRun) -> None:
        run.logprobs = [[one / 2 for one in row] for row in run.logprobs]
        run.settings["temperature"] = 0.7

    found = compared(tmp_path, change=change)
    assert (found.equal, found.first) == (False, None)
    assert "look at the settings of the sampler" in found.to_text()


def test_tokens_after_a_parting_and_those_of_a_cache_are_not_compared(tmp_path: Path) -> None:
    """Two engines may sample otherwise, and a cache may have computed a prompt before."""

    def change(run: RecordedRun) -> None:
        run.tokens = [[*TOKENS[0][:-2], 7, 7], TOKENS[1]]
        run.steps = {one: 0 for one in run.steps if one > 1}
        run.restrict(torch.tensor([*run.steps]))

    found = compared(tmp_path, change=change)
    assert found.equal is True
    assert any("request 0 from position 5 on" in one for one in found.remarks)
    assert any("2 tokens from its prefix cache" in one for one in found.remarks)


def test_the_result_is_a_document_and_a_page(tmp_path: Path) -> None:
    """Both name the module, and the text has all facts."""
    pytest.importorskip("jinja2")
    found = compared(tmp_path, eps)
    read_back = json.loads(found.to_json())
    assert (read_back["schema"], read_back["equal"]) == ("nanwatch.enginecomparison", False)
    assert read_back["comparison"]["first"]["module_a"] == "layers.1.norm"
    page = found.to_html()
    assert "layers.1.norm" in page
    assert "effective sample size" in page
    assert all(head in found.to_text() for head in ("Tokens:", "Depth:", "Gap:", "A: trainer 1"))
