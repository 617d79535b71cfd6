"""Callback for TRL's GRPOTrainer: the gap between the policy and the vLLM that samples for it."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..equivalence.engine_comparison import EngineComparison
from ..equivalence.probability_gap import ProbabilityGap, probability_gap
from ..util.imports import needed
from ..util.visible import first_few, suppressing, visible
from .engine_compare import compare_engine
from .vllm_run import stale_weights

_TrainerCallback: Any = needed(
    "transformers.trainer_callback", "nanwatch.integrations.trl", "transformers"
).TrainerCallback
_MOST_PROMPTS = 4
# Looks before the present one that a jump is measured against.
_HISTORY = 20


class EngineGapCallback(_TrainerCallback):  # type: ignore[misc]
    """Callback that logs how far vLLM's log-probabilities are from the policy's, and looks for the module at a jump.

    Add it to a GRPOTrainer with `use_vllm=True`: `trainer.add_callback(EngineGapCallback(trainer))`. With TRL's metrics
    it logs "nanwatch/gap_mean", "nanwatch/gap_max", "nanwatch/gap_kl" and "nanwatch/gap_effective". At a jump it warns,
    names the weights of an engine in this process that are stale since the sync of this step, and compares the two.
    In a job of several processes it warns alone, because the model may be in parts there.

    Args:
        trainer: the GRPOTrainer.
        every: steps between two looks.
        jump: how many times the median of the looks before, at most 20 of them, the mean gap must be.
        least: mean gap in nats below which nothing is a jump.
        compare: at a jump, save the policy to a folder and compare it with the engine there.
        options: those of `nanwatch.compare_engine`.

    Raises ValueError for numbers that make no sense.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        every: int = 10,
        jump: float = 3.0,
        least: float = 1e-3,
        compare: bool = True,
        **options: Any,
    ) -> None:
        if every < 1 or not jump > 1 or not least >= 0:
            raise ValueError(
                f"every should be at least 1, jump above 1 and least not below 0, got {every}, {jump} and {least}"
            )
        self._trainer = trainer
        self._every, self._jump, self._least = every, jump, least
        self._compare, self._options = compare, options
        self._log = logging.getLogger("nanwatch.trl")
        self.history: list[ProbabilityGap] = []
        self.found: EngineComparison | None = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the batch of this step, if it is one of those, while the policy is as it was synced."""
        if (state.global_step + 1) % self._every == 0:
            with suppressing("the gap to vLLM could not be measured"):
                self._look(state.global_step, is_alone=args.world_size == 1)

    def _look(self, done: int, *, is_alone: bool) -> None:
        trainer = self._trainer
        batches = [one for one in trainer._buffered_inputs or () if "sampling_per_token_logps" in one]
        gap = gap_of(batches)
        if gap is None:
            return
        before = [one.mean for one in self.history[-_HISTORY:]]
        self.history.append(gap)
        entry = {"mean": gap.mean, "max": gap.largest, "kl": gap.kl, "effective": gap.effective}
        for name, number in entry.items():
            trainer._metrics["train"][f"nanwatch/gap_{name}"].append(number)
        if not before or gap.mean <= max(self._least, self._jump * median(before)):
            return
        jump = f"from {median(before):.2g} to {gap.mean:.2g} nats in the mean"
        words = [f"step {done + 1}: the gap to vLLM jumps {jump} ({gap})"]
        policy = trainer.accelerator.unwrap_model(trainer.model)
        engine = getattr(getattr(trainer, "vllm_generation", None), "llm", None)  # None in a server
        is_synced = getattr(trainer, "_last_loaded_step", done) == done
        # An adapter is merged for the sync alone, and other ranks may have parts of a weight.
        if engine is not None and is_alone and is_synced and not hasattr(policy, "peft_config"):
            with suppressing("the weights of vLLM could not be compared"):
                off = stale_weights(policy, engine)
                words += [f"stale in vLLM: {first_few(off)}"] if off else []
        if self._compare and is_alone:
            with (
                suppressing("the engine could not be compared with the policy"),
                tempfile.TemporaryDirectory(prefix="nanwatch-policy-") as folder,
            ):
                trainer.save_model(folder)
                self.found = compare_engine(folder, prompts_of(batches), **self._options)
                words.append(f"with the weights saved: {self.found.comparison.headline}")
        self._log.warning("nanwatch: %s", visible("; ".join(words)))


def gap_of(batches: Iterable[Mapping[str, Any]]) -> ProbabilityGap | None:
    """Return the gap of TRL's batches, None where they have no token. Log-probabilities that are nan do not count."""
    ours, theirs = list[list[float]](), list[list[float]]()
    for batch in batches:
        policy: Tensor = batch["old_per_token_logps"]
        engine: Tensor = batch["sampling_per_token_logps"]
        is_known = batch["completion_mask"].bool() & torch.isfinite(policy) & torch.isfinite(engine)
        for found, logs in ((ours, policy), (theirs, engine)):
            found += [row[known].double().tolist() for row, known in zip(logs, is_known, strict=True)]
    return probability_gap(ours, theirs)


def prompts_of(batches: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """Return the first different prompts, without padding."""
    known = dict.fromkeys(
        tuple(ids[mask.bool()].tolist())
        for batch in batches
        for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    )
    return [list(one) for one in known][:_MOST_PROMPTS]
