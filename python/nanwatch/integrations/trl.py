"""Callback for TRL's GRPOTrainer: the gap between the policy's training step and what samples for it."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..equivalence.engine_comparison import EngineComparison
from ..equivalence.probability_gap import ProbabilityGap, probability_gap
from ..util.imports import needed
from ..util.visible import suppressing, visible
from .decoding import compare_decoding, decoding_gap
from .engine_compare import compare_engine
from .vllm_run import stale_weights

_TrainerCallback: Any = needed(
    "transformers.trainer_callback", "nanwatch.integrations.trl", "transformers"
).TrainerCallback
_MOST_PROMPTS = 4
_T = TypeVar("_T")
# Looks before the present one that a jump is measured against.
_HISTORY = 20


class EngineGapCallback(_TrainerCallback):  # type: ignore[misc]
    """Callback that logs how far vLLM's log-probabilities are from the policy's, and looks for the module at a jump.

    Add it to a GRPOTrainer with `use_vllm=True`: `trainer.add_callback(EngineGapCallback(trainer))`. With TRL's metrics
    it logs "nanwatch/gap_mean", "nanwatch/gap_max", "nanwatch/gap_kl" and "nanwatch/gap_effective". At a jump it warns,
    names the weights of an engine in this process that are stale, and runs `compare`. In a job of several processes it
    warns alone, because saving the model there needs all of them.

    With `use_vllm=False` the model samples itself. Then the gap is that between one forward over a few answers and
    decoding them with a cache, both computed again at temperature 1, and a jump names the module in this process. That
    needs a job of one process.

    Args:
        trainer: the GRPOTrainer.
        every: steps between two looks.
        jump: how many times the median of the looks before, at most 20 of them, the mean gap must be.
        least: mean gap in nats below which nothing is a jump.
        compare: called with the trainer and some prompts as token ids; names the module. None: not looked for.
        options: those of `nanwatch.compare_engine` for the default `compare`, which saves the policy to a folder.

    Raises ValueError for numbers that make no sense.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        every: int = 10,
        jump: float = 3.0,
        least: float = 1e-3,
        compare: Callable[[Any, list[list[int]]], EngineComparison] | str | None = "saved",
        **options: Any,
    ) -> None:
        if every < 1 or not jump > 1 or not least >= 0:
            raise ValueError(
                f"every should be at least 1, jump above 1 and least not below 0, got {every}, {jump} and {least}"
            )
        self._trainer = trainer
        self._every, self._jump, self._least = every, jump, least
        self._compare = self._saved if compare == "saved" else compare
        self._options = {"engine_python": sys.executable, **options}
        self._log = logging.getLogger("nanwatch.trl")
        self.history: list[ProbabilityGap] = []
        self.found: EngineComparison | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the batch of this step, if it is one of those."""
        if state.global_step % self._every == 0:
            with suppressing("the gap to vLLM could not be measured"):
                self._look(state.global_step, is_alone=args.world_size == 1)

    def _look(self, step: int, *, is_alone: bool) -> None:
        batches = list(self._trainer._buffered_inputs or ())
        sampler, gap = "vLLM", gap_of(one for one in batches if "sampling_per_token_logps" in one)
        if gap is None and getattr(self._trainer, "use_vllm", True) is False and is_alone:
            sampler, gap = "decoding", self._decoding(decoding_gap, batches)
        if gap is None:
            return
        before = [one.mean for one in self.history[-_HISTORY:]]
        self.history.append(gap)
        entry = {"mean": gap.mean, "max": gap.largest, "kl": gap.kl, "effective": gap.effective}
        for name, number in entry.items():
            self._trainer._metrics["train"][f"nanwatch/gap_{name}"].append(number)
        if not before or gap.mean <= max(self._least, self._jump * median(before)):
            return
        words = [
            f"step {step}: the gap to {sampler} jumps from {median(before):.2g} to {gap.mean:.2g} nats in the mean"
            f" ({gap})"
        ]
        engine = getattr(getattr(self._trainer, "vllm_generation", None), "llm", None)  # None in a server
        if engine is not None:
            with suppressing("the weights of vLLM could not be compared"):
                off = stale_weights(self._trainer.accelerator.unwrap_model(self._trainer.model), engine)
                more = f" and {len(off) - 4} more" if len(off) > 4 else ""
                words += [f"stale in vLLM: {', '.join(off[:4])}{more}"] if off else []
        if callable(self._compare) and is_alone:
            with suppressing("the engine could not be compared with the policy"):
                is_own = sampler == "decoding"
                self.found = (
                    self._decoding(compare_decoding, batches)
                    if is_own
                    else self._compare(self._trainer, prompts_of(batches))
                )
                words.append(self.found.comparison.headline)
        self._log.warning("nanwatch: %s", visible("; ".join(words)))

    def _decoding(self, look: Callable[..., _T], batches: Iterable[Mapping[str, Any]]) -> _T:
        """Look at the model as TRL generates with it, without gradient checkpointing."""
        prepared = needed("trl.models.utils", "nanwatch.integrations.trl", "trl").unwrap_model_for_generation
        trainer = self._trainer
        more = {"gradient_checkpointing_kwargs": trainer.args.gradient_checkpointing_kwargs}
        with prepared(trainer.model_wrapped, trainer.accelerator, **more) as model:
            return look(model, *answers_of(batches))

    def _saved(self, trainer: Any, prompts: list[list[int]]) -> EngineComparison:
        with tempfile.TemporaryDirectory(prefix="nanwatch-policy-") as folder:
            trainer.save_model(folder)
            return compare_engine(folder, prompts, **self._options)


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


def _rows(batch: Mapping[str, Any], kind: str) -> list[list[int]]:
    """Return the tokens of each row, without padding."""
    both = zip(batch[f"{kind}_ids"], batch[f"{kind}_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in both]


def prompts_of(batches: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """Return the first different prompts, without padding."""
    known = dict.fromkeys(tuple(row) for batch in batches for row in _rows(batch, "prompt"))
    return [list(one) for one in known][:_MOST_PROMPTS]


def answers_of(batches: Iterable[Mapping[str, Any]]) -> tuple[list[list[int]], list[int]]:
    """Return the first different prompts with their answers, without padding, and the lengths of these answers."""
    known = {
        (*prompt, *answer): len(answer)
        for batch in batches
        for prompt, answer in zip(_rows(batch, "prompt"), _rows(batch, "completion"), strict=True)
        if prompt and answer
    }
    return [list(one) for one in known][:_MOST_PROMPTS], [*known.values()][:_MOST_PROMPTS]
