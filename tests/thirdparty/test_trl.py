"""Callback for GRPO, with a stand-in for TRL's trainer that has the batches and metrics of TRL 1.16."""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
trl = pytest.importorskip("nanwatch.integrations.trl")
from nanwatch.equivalence.recorded_run import fingerprints  # noqa: E402
from nanwatch.integrations.vllm_run import stale_weights  # noqa: E402


class Engine:
    """vLLM's LLM, as far as the callback asks."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        sizes, dtype = SimpleNamespace(world_size=1), SimpleNamespace(dtype=torch.bfloat16)
        config = SimpleNamespace(model_config=dtype, parallel_config=sizes)
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self._model)]


class Trainer:
    """GRPOTrainer: a batch of two answers, the second of which has one token less."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
        self._metrics: Any = {"train": defaultdict(list)}
        self._buffered_inputs: Any = None
        synced = nn.Linear(4, 4)
        synced.load_state_dict(self.model.state_dict())
        self.vllm_generation = SimpleNamespace(llm=Engine(synced.bfloat16()))

    def save_model(self, folder: str) -> None:
        Path(folder, "policy").touch()

    def sample(self, gap: float) -> None:
        logs = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -2.0, 0.0]])
        engine = logs + gap
        engine[0, 0] = float("nan")
        ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
        batch = {"old_per_token_logps": logs, "sampling_per_token_logps": engine, "prompt_ids": ids}
        batch |= {"prompt_mask": mask, "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
        self._buffered_inputs = [batch]


def steps(callback: Any, trainer: Trainer, gaps: list[float], world_size: int = 1) -> None:
    for step, gap in enumerate(gaps, 1):
        trainer.sample(gap)
        state = SimpleNamespace(global_step=step - 1)
        callback.on_pre_optimizer_step(SimpleNamespace(world_size=world_size), state, None)


def test_the_gap_is_logged_every_few_steps() -> None:
    """Without padding, and without a log-probability that vLLM has not."""
    trainer = Trainer()
    callback = trl.EngineGapCallback(trainer, every=2)
    steps(callback, trainer, [0.5, 0.25, 0.5, 0.25])
    assert trainer._metrics["train"]["nanwatch/gap_mean"] == pytest.approx([0.25, 0.25])
    assert [one.tokens for one in callback.history] == [4, 4]


def test_a_jump_names_stale_weights_and_the_module(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; the comparison is given the prompts without padding, and the policy in a folder."""
    trainer, asked = Trainer(), list[Any]()

    def compare(folder: str, prompts: Any, **options: Any) -> Any:
        asked.append((Path(folder, "policy").exists(), prompts, options))
        return SimpleNamespace(comparison=SimpleNamespace(headline="Differ first in model.layers.3.mlp"))

    monkeypatch.setattr(trl, "compare_engine", compare)
    callback = trl.EngineGapCallback(trainer, every=1, max_tokens=2)
    with caplog.at_level(logging.WARNING, "nanwatch.trl"):
        steps(callback, trainer, [0.01, 0.012, 0.011])
        assert not caplog.messages
        with torch.no_grad():
            trainer.model.bias[1] += 1
        steps(callback, trainer, [0.2])
    [message] = caplog.messages
    assert "jumps from 0.011 to 0.2" in message
    assert "stale in vLLM: bias;" in message
    assert "Differ first in model.layers.3.mlp" in message
    assert asked == [(True, [[5, 6], [7, 8, 9]], {"max_tokens": 2})]
    assert callback.found is not None


def test_several_processes_are_only_warned(caplog: pytest.LogCaptureFixture) -> None:
    """One of them alone cannot save the model, and may have a part of it."""
    trainer = Trainer()
    nn.init.zeros_(trainer.model.bias)
    callback = trl.EngineGapCallback(trainer, every=1, nonsense="not asked for")
    steps(callback, trainer, [0.01, 0.2], world_size=2)
    assert "jumps" in caplog.text
    assert "stale" not in caplog.text


def test_batches_without_an_engine_are_left_alone() -> None:
    """As those before the first generation, and without vLLM."""
    trainer = Trainer()
    callback = trl.EngineGapCallback(trainer, every=1)
    for given in (None, [{"old_per_token_logps": torch.zeros(1, 1)}]):
        trainer._buffered_inputs = given
        callback.on_pre_optimizer_step(SimpleNamespace(world_size=1), SimpleNamespace(global_step=0), None)
    assert not callback.history
    with pytest.raises(ValueError, match="every should be"):
        trl.EngineGapCallback(trainer, every=0)


def test_fingerprints_of_another_dtype_are_those_of_a_cast() -> None:
    """A trainer in float32 syncs bfloat16."""
    model = nn.Linear(3, 3)
    cast = fingerprints(model, torch.bfloat16)
    assert cast == fingerprints(model.bfloat16())


def test_an_engine_in_parts_is_refused() -> None:
    """Each process has parts of the weights."""
    engine = Engine(nn.Linear(2, 2))
    engine.llm_engine.vllm_config.parallel_config.world_size = 2
    with pytest.raises(ValueError, match="several processes"):
        stale_weights(nn.Linear(2, 2), engine)
