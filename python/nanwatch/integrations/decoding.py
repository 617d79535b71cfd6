"""Forward of a training step against decoding with a cache, in one model of transformers and on the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import nn

from ..equivalence.engine_comparison import EngineComparison, compare_runs
from ..equivalence.probability_gap import ProbabilityGap, probability_gap
from ..equivalence.recorded_run import RecordedRun
from ..util.modules import each_module
from .transformers_run import run_over


def decoding_gap(
    model: nn.Module, tokens: Sequence[Sequence[int]], sampled: Sequence[int]
) -> ProbabilityGap | None:
    """Return the gap between the log-probabilities of the last `sampled` tokens of each request, at temperature 1."""
    read, decoded = (run_over(model, RecordedRun(""), tokens, sampled, decodes=one) for one in (False, True))
    return probability_gap(read.logprobs, decoded.logprobs)


def compare_decoding(
    model: nn.Module, tokens: Sequence[Sequence[int]], sampled: Sequence[int], most_bytes: int = 1 << 30
) -> EngineComparison:
    """Name the first module that computes other numbers in decoding than in one forward over all tokens.

    The floor of a module is its error against a forward of a copy in higher precision. Raises what the model raises.
    """

    def run(name: str, own: nn.Module = model) -> RecordedRun:
        return run_over(own, RecordedRun(name), tokens, sampled, most_bytes, decodes=name == "decoding")

    a, b = run("one forward"), run("decoding")

    def read(dtype: torch.dtype) -> RecordedRun:
        if dtype is a.dtype:
            return a
        copy = deepcopy(model).to(dtype)
        # TRL's and Accelerate's functions in place of a forward call that of the original.
        for _, module in each_module(copy):
            vars(module).pop("forward", None)
        return run("one forward", copy)

    return compare_runs((a, b, read))
