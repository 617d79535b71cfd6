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
from ..equivalence.recorded_run import fingerprints, stale
from ..util.imports import needed
from ..util.visible import suppressing, visible
from .decoding import compare_decoding, decoding_gap
from .engine_compare import compare_engine

_TrainerCallback: Any = needed(
    "transformers.trainer_callback", "nanwatch.integrations.trl", "transformers"
).TrainerCallback
_MOST_PROMPTS = 4
_T = TypeVar("_T")
# Tokens of some prompts with their answers, and how many of the last ones each answer has.
Answers = tuple[list[list[int]], list[int]]
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
        if state.global_step % self._every:
            return
        with suppressing("the gap to vLLM could not be measured"):
            batches = [
                one for one in self._trainer._buffered_inputs or () if "sampling_per_token_logps" in one
            ]
            gap = gap_of(batches)
            answers = None
            if gap is None and getattr(self._trainer, "use_vllm", True) is False and args.world_size == 1:
                batches = list(self._trainer._buffered_inputs or ())
                answers = answers_of(batches)
                gap = self._decoding(decoding_gap, answers)
            if gap is None:
                return
            before = [one.mean for one in self.history[-_HISTORY:]]
            self.history.append(gap)
            self._tell(gap)
            if before and gap.mean > max(self._least, self._jump * median(before)):
                self._look(
                    gap, median(before), state.global_step, batches, answers, is_alone=args.world_size == 1
                )

    def _tell(self, gap: ProbabilityGap) -> None:
        entry = {"mean": gap.mean, "max": gap.largest, "kl": gap.kl, "effective": gap.effective}
        for name, number in entry.items():
            self._trainer._metrics["train"][f"nanwatch/gap_{name}"].append(number)

    def _look(
        self,
        gap: ProbabilityGap,
        before: float,
        step: int,
        batches: list[Mapping[str, Any]],
        answers: Answers | None,
        *,
        is_alone: bool,
    ) -> None:
        sampler = "vLLM" if answers is None else "decoding"
        words = [
            f"step {step}: the gap to {sampler} jumps from {before:.2g} to {gap.mean:.2g} nats in the mean ({gap})"
        ]
        with suppressing("the weights of vLLM could not be compared"):
            if off := self._stale():
                more = f" and {len(off) - 4} more" if len(off) > 4 else ""
                words.append(f"stale in vLLM: {', '.join(off[:4])}{more}")
        if callable(self._compare) and is_alone:
            with suppressing("the engine could not be compared with the policy"):
                self.found = (
                    self._compare(self._trainer, list(prompts_of(batches)))
                    if answers is None
                    else self._decoding(compare_decoding, answers)
                )
                words.append(self.found.comparison.headline)
        self._log.warning("nanwatch: %s", visible("; ".join(words)))

    def _decoding(self, look: Callable[..., _T], answers: Answers) -> _T:
        """Look at the model as TRL generates with it, without gradient checkpointing."""
        prepared = needed("trl.models.utils", "nanwatch.integrations.trl", "trl").unwrap_model_for_generation
        trainer = self._trainer
        more = {"gradient_checkpointing_kwargs": trainer.args.gradient_checkpointing_kwargs}
        with prepared(trainer.model_wrapped, trainer.accelerator, **more) as model:
            return look(model, *answers)

    def _stale(self) -> list[str]:
        engine = getattr(getattr(self._trainer, "vllm_generation", None), "llm", None)
        if engine is None:
            return []  # in a server
        dtype = engine.llm_engine.vllm_config.model_config.dtype
        ours = fingerprints(self._trainer.accelerator.unwrap_model(self._trainer.model), dtype)
        return [name for theirs in engine.apply_model(fingerprints) for name in stale(ours, theirs)]

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
        for row in range(len(policy)):
            ours.append(policy[row][is_known[row]].double().tolist())
            theirs.append(engine[row][is_known[row]].double().tolist())
    return probability_gap(ours, theirs)


def prompts_of(batches: Iterable[Mapping[str, Any]]) -> Iterable[list[int]]:
    """Return the first different prompts, without padding."""
    known = dict.fromkeys(
        tuple(ids[mask.bool()].tolist())
        for batch in batches
        for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    )
    return [list(one) for one in list(known)[:_MOST_PROMPTS]]


def answers_of(batches: Iterable[Mapping[str, Any]]) -> Answers:
    """Return the first different answers with their prompts, without padding."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    known: dict[tuple[int, ...], int] = {}
    for batch in batches:
        for ids, mask, answer, answer_mask in zip(*(batch[name] for name in names), strict=True):
            own = answer[answer_mask.bool()].tolist()
            if own and mask.any():
                known.setdefault((*ids[mask.bool()].tolist(), *own), len(own))
    first = list(known)[:_MOST_PROMPTS]
    return [list(one) for one in first], [known[one] for one in first]
