"""Run of a transformers model over requests: in one forward each, as a trainer, or decoding with a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from ..equivalence.packed import PackedRun, Places
from ..equivalence.recorded_run import RecordedRun, fingerprints
from ..instrumentation.execution_context import RngState
from ..util.imports import needed
from .run_request import RunRequest, flat

# Settings of an engine that a trainer lacks, so a trainer always runs with these values.
_TRAINERS = {"kv_cache_dtype": "auto", "quantization": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
             "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
             "logprobs_mode": "raw_logprobs"}  # fmt: skip


def record(requests: Sequence[RunRequest]) -> Iterator[RecordedRun]:
    """Yield a run for each request. One without sampled tokens samples them as it decodes."""
    transformers: Any = needed("transformers", "nanwatch compare --engine", "transformers")
    for request in requests:
        request.tokenize()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            request.model, dtype=getattr(torch, request.dtype), **request.options
        )
        model.eval()
        request.plant(model)
        settings = {**_TRAINERS, **flat(model.config.to_dict()), "dtype": request.dtype}
        name, prints = f"transformers {transformers.__version__}", fingerprints(model)
        found = RecordedRun(name, model.dtype, settings=settings, prints=prints)
        sampled, samples = request.sampled or [0] * len(request.prompts), request.max_tokens
        yield run_over(
            model, found, request.prompts, sampled, request.most_bytes, samples, decodes=samples > 0
        )


def run_over(
    model: nn.Module,
    found: RecordedRun,
    tokens: Sequence[Sequence[int]],
    sampled: Sequence[int],
    most_bytes: int = 0,
    samples: int = 0,
    *,
    decodes: bool = False,
) -> RecordedRun:
    """Run the requests, the last `sampled` tokens of each one by one if it `decodes`.

    Calls are recorded if there are bytes for them. With `samples`, as many tokens are sampled and appended. The model
    stays in its mode, and random states are as before. Gradients are off.
    """
    run, random = PackedRun(most_bytes, lead=1), RngState.capture(others=True)
    can_keep = "logits_to_keep" in signature(model.forward).parameters
    device = next(model.parameters()).device
    with ExitStack() as after:
        after.callback(random.restore)
        after.enter_context(torch.no_grad())
        if most_bytes:
            after.enter_context(run.recording(model))
        for number, (given, count) in enumerate(zip(tokens, sampled, strict=True)):
            generator = torch.Generator().manual_seed(0)
            own, first, cache, at = list(given), len(given) - count, None, 0
            logs, end = list[float](), len(given) - 1 + samples
            while at < end:
                stop = (at + 1 if at else first) if decodes else end
                keep = stop - max(at, first - 1)
                run.step_begins(partial(Places.of, [(number, at, stop - at)], keep))
                output = model(
                    input_ids=torch.tensor([own[at:stop]], device=device),
                    past_key_values=cache,
                    use_cache=decodes,
                    **({"logits_to_keep": keep} if can_keep else {}),
                )
                run.step_ended()
                cache, at = output.past_key_values if decodes else None, stop
                chances = output.logits[0, -keep:].double().log_softmax(-1).cpu()
                if stop == len(own):
                    own += torch.multinomial(chances[-1].exp(), 1, generator=generator).tolist()
                asked = torch.tensor(own[stop - keep + 1 : stop + 1])
                logs += chances.gather(1, asked[:, None])[:, 0].tolist()
            found.tokens.append(own)
            found.sampled.append(count + samples)
            found.logprobs.append(logs)
    return found.take_calls(run) if most_bytes else found
