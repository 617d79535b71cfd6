"""Forward of a training step against decoding with a cache, in one model of transformers and on the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy

import torch
from torch import Tensor, nn

from ..equivalence.engine_comparison import EngineComparison, compare_runs
from ..equivalence.packed import PackedRun, Places
from ..equivalence.probability_gap import ProbabilityGap, probability_gap
from ..equivalence.recorded_run import RecordedRun
from ..instrumentation.execution_context import RngState
from ..util.modules import each_module


def decoding_gap(
    model: nn.Module, tokens: Sequence[Sequence[int]], sampled: Sequence[int]
) -> ProbabilityGap | None:
    """Return the gap between the log-probabilities of the last `sampled` tokens of each request, at temperature 1.

    The model stays in its mode, and random states are as before. Gradients are off.
    """
    with _unseen():
        runs = [_run(model, tokens, sampled, decodes=decodes) for decodes in (False, True)]
    return probability_gap(runs[0].logprobs, runs[1].logprobs)


def compare_decoding(
    model: nn.Module, tokens: Sequence[Sequence[int]], sampled: Sequence[int], most_bytes: int = 1 << 30
) -> EngineComparison:
    """Name the first module that computes other numbers in decoding than in one forward over all tokens.

    The floor of a module is its error against a forward of a copy in higher precision. Raises what the model raises.
    """

    def read(dtype: torch.dtype) -> RecordedRun:
        if dtype is a.dtype:
            return a
        copy = deepcopy(model).to(dtype)
        # TRL's and Accelerate's functions in place of a forward call that of the original.
        for _, module in each_module(copy):
            vars(module).pop("forward", None)
        return _run(copy, tokens, sampled, most_bytes=most_bytes)

    with _unseen():
        a, b = (_run(model, tokens, sampled, most_bytes=most_bytes, decodes=one) for one in (False, True))
        return compare_runs(a, b, read)


@contextmanager
def _unseen() -> Iterator[None]:
    """Leave no gradients, and random states as they were."""
    random = RngState.capture(others=True)
    try:
        with torch.no_grad():
            yield
    finally:
        random.restore()


def _run(
    model: nn.Module,
    tokens: Sequence[Sequence[int]],
    sampled: Sequence[int],
    *,
    most_bytes: int = 0,
    decodes: bool = False,
) -> RecordedRun:
    """Run the requests, and record the calls if there are bytes for them."""
    found = RecordedRun("decoding" if decodes else "one forward", sampled=list(sampled))
    found.tokens = [list(one) for one in tokens]
    run = PackedRun(most_bytes, lead=1)
    device = next(model.parameters()).device
    with run.recording(model) if most_bytes else nullcontext():
        for number, (own, count) in enumerate(zip(found.tokens, found.sampled, strict=True)):
            first, cache, at = len(own) - count, None, 0
            parts = [own[:first], *([one] for one in own[first:-1])] if decodes else [own[:-1]]
            logits = list[Tensor]()
            for step, part in enumerate(parts):
                places = Places.of([(number, at, len(part))])
                found.steps |= dict.fromkeys(places.tokens.tolist(), step)
                run.step_begins(lambda places=places: places)  # type: ignore[misc]
                output = model(
                    input_ids=torch.tensor([part], device=device), past_key_values=cache, use_cache=decodes
                )
                run.step_ended()
                cache, at = output.past_key_values if decodes else None, at + len(part)
                logits.append(output.logits[0])
            logs = torch.cat(logits)[first - 1 :].double().log_softmax(-1).cpu()
            found.logprobs.append(logs.gather(1, torch.tensor(own[first:])[:, None])[:, 0].tolist())
    if most_bytes:
        found.take_calls(run)
    return found
