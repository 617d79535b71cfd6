"""Run of a transformers model over requests: in one forward each, as a trainer, or decoding with a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from ..equivalence.packed import PackedRun, Places
from ..equivalence.recorded_run import RecordedRun, fingerprints
from ..util.imports import needed
from .run_request import SAMPLER, RunRequest, flat

# Settings of an engine that a trainer lacks, so a trainer always runs with these values.
_TRAINERS = {**SAMPLER, "kv_cache_dtype": "auto", "quantization": None, "logprobs_mode": "raw_logprobs"}


def record(requests: Sequence[RunRequest]) -> Iterator[RecordedRun]:
    """Yield a run for each request. One without sampled tokens samples them as it decodes."""
    transformers: Any = needed("transformers", "nanwatch compare --engine", "transformers")
    for request in requests:
        request.tokenize()
        dtype = getattr(torch, request.dtype)
        made = transformers.AutoModelForCausalLM.from_pretrained
        model = made(request.model, dtype=dtype, **request.options).eval()
        request.plant(model)
        settings = {**_TRAINERS, **flat(model.config.to_dict()), "dtype": request.dtype}
        if model.config._attn_implementation == "sdpa" and settings.get("attn_logit_softcapping"):
            settings["attn_logit_softcapping"] = None  # transformers < 5.24 runs SDPA without
        prints, run = fingerprints(model, dtype), PackedRun(request.most_bytes, lead=1)
        found = RecordedRun(
            f"transformers {transformers.__version__}", dtype, settings=settings, prints=prints
        )
        with torch.no_grad(), run.recording(model):
            for number in range(len(request.prompts)):
                _follow(model, run, found, request, number)
        yield found.take_calls(run)


def _follow(model: nn.Module, run: PackedRun, found: RecordedRun, request: RunRequest, number: int) -> None:
    """Read a request at once for the logits of its last tokens, the answer. Or sample that token by token."""
    tokens, samples = [*request.prompts[number]], request.max_tokens
    answer = request.sampled[number] if request.sampled else 0
    generator = torch.Generator().manual_seed(0)
    can_keep = "logits_to_keep" in signature(model.forward).parameters
    logs, cache, at, end, keep = list[float](), None, 0, len(tokens) - 1 + samples, answer or 1
    while at < end:
        stop = (at + 1 if at else len(tokens)) if samples else end
        run.step_begins(partial(Places.of, [(number, at, stop - at)], keep))
        more = {"logits_to_keep": keep} if can_keep else {}
        new = torch.tensor([tokens[at:stop]])
        output = model(input_ids=new, past_key_values=cache, use_cache=samples > 0, **more)
        run.step_ended()
        cache, at = output.past_key_values if samples else None, stop
        chances = output.logits[0, -keep:].double().log_softmax(-1)
        if samples:
            tokens += torch.multinomial(chances[-1].exp(), 1, generator=generator).tolist()
        asked = torch.tensor(tokens[stop - keep + 1 : stop + 1])
        logs += chances.gather(1, asked[:, None])[:, 0].tolist()
    found.tokens.append(tokens)
    found.sampled.append(answer + samples)
    found.logprobs.append(logs)
