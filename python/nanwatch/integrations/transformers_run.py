"""Run of a transformers model for `nanwatch compare --engine`: as the trainer on given tokens, or as an engine."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch import nn

from ..equivalence.packed import STRIDE, PackedRun, Places
from ..equivalence.recorded_run import RecordedRun, fingerprints
from ..util.imports import needed
from .run_request import RunRequest, flat, patch_of

# Settings of an engine that a trainer lacks, so a trainer always runs with these values.
_TRAINERS = {"kv_cache_dtype": "auto", "quantization": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
             "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
             "logprobs_mode": "raw_logprobs"}  # fmt: skip


def record(request: RunRequest) -> Iterator[RecordedRun]:
    """Yield a run for each that is asked for. Those without tokens sample them, prefill and then token by token."""
    transformers: Any = needed("transformers", "nanwatch compare --engine", "transformers")
    for asked in request.runs:
        dtype = getattr(torch, asked.dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            request.model, dtype=dtype, **request.options
        )
        model.eval().requires_grad_(False)
        if request.patch:
            patch_of(request.patch)(model)
        settings = {**_TRAINERS, **flat(model.config.to_dict()), "dtype": asked.dtype}
        found = RecordedRun(
            f"transformers {transformers.__version__}", dtype, settings=settings, prints=fingerprints(model)
        )
        run = PackedRun(request.most_bytes, lead=1)
        with torch.no_grad(), run.recording(model):
            if asked.tokens is None:
                _sample(model, request, found, run)
            else:
                found.tokens, found.sampled = asked.tokens, asked.sampled
                for number, (tokens, count) in enumerate(zip(found.tokens, found.sampled, strict=True)):
                    _forward(model, run, number, tokens, count)
        found.take_calls(run)
        yield found


def _forward(model: nn.Module, run: PackedRun, number: int, tokens: list[int], count: int) -> None:
    """Read a request as a training step does, with logits for the sampled tokens where the model can do less."""
    places = Places.of([(number, 0, len(tokens))])
    asked = torch.arange(max(len(tokens) - count - 1, 0), len(tokens) - 1 if count else len(tokens))
    more: dict[str, Any] = {}
    if "logits_to_keep" in signature(model.forward).parameters:
        more, places = {"logits_to_keep": asked}, places._replace(last=number * STRIDE + asked)
    run.step_begins(lambda: places)
    model(input_ids=torch.tensor([tokens]), use_cache=False, **more)
    run.step_ended()


def _sample(model: nn.Module, request: RunRequest, found: RecordedRun, run: PackedRun) -> None:
    for number, prompt in enumerate(request.prompts):
        generator = torch.Generator().manual_seed(request.seed)
        tokens, new, cache = list(prompt), list(prompt), None
        logs: list[float] = []
        for _ in range(request.max_tokens):
            places = Places.of([(number, len(tokens) - len(new), len(new))])
            found.steps |= dict.fromkeys(places.tokens.tolist(), len(logs))
            run.step_begins(lambda places=places: places)  # type: ignore[misc]
            output = model(
                input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            run.step_ended()
            cache = output.past_key_values
            chances = output.logits[0, -1].double().log_softmax(-1)
            new = torch.multinomial(chances.exp(), 1, generator=generator).tolist()
            tokens += new
            logs.append(float(chances[new[0]]))
        found.tokens.append(tokens)
        found.sampled.append(len(logs))
        found.logprobs.append(logs)
