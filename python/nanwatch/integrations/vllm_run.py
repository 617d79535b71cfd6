"""Run of vLLM's model for `nanwatch compare --engine vllm`, in this process, with the rows of every step."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ..equivalence.packed import PackedRun, Places
from ..equivalence.recorded_run import RecordedRun, fingerprints, stale
from .run_request import SAMPLER, RunRequest, flat
from .serving import Share
from .vllm import WORKER_MODULE, StepShares, patch

# The engine in this process, where its model and its steps can be seen.
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
_CPU_CACHE = 1 << 28
# Settings that change numbers, by the part of vLLM's config that has them.
_SETTINGS = {
    "model_config": ("quantization", "enforce_eager", "logprobs_mode"),
    "cache_config": ("cache_dtype", "enable_prefix_caching", "block_size"),
    "scheduler_config": ("enable_chunked_prefill", "max_num_batched_tokens", "max_num_seqs"),
}


class _RecordedSteps(StepShares):
    """Steps of a worker, told to a run. Takes the place of the plugin's watched model."""

    def __init__(self, run: PackedRun) -> None:
        super().__init__()
        self._run = run

    def start(self, model: Any) -> None:
        """Do nothing: the model is recorded from the first step on."""

    def stop(self) -> None:
        """Do nothing: the model is let go with the engine."""

    def step_begins(self, ask: Callable[[], Sequence[Share]]) -> None:
        """Begin a step of the run."""

        def part(one: Share) -> tuple[int, int, int]:
            # vLLM numbers the requests of an engine from 0, and puts letters of its own behind.
            return int(one.request.split("-")[0]), one.position, one.num_tokens

        self._run.step_begins(lambda: Places.of([*map(part, ask())]))

    def step_ended(self, *outputs: object) -> None:
        """End the step."""
        self._run.step_ended()


def record(requests: Sequence[RunRequest]) -> Iterator[RecordedRun]:
    """Yield a run for each request; vLLM samples the tokens itself."""
    os.environ.update(_ENVIRONMENT)
    vllm: Any = import_module("vllm")
    base_loader: Any = import_module("vllm.model_executor.model_loader.base_loader")
    import_module(WORKER_MODULE)
    patch()
    for request in requests:
        request.tokenize()
        yield _recorded(vllm, base_loader, request)
        gc.collect()


def _recorded(vllm: Any, loader: Any, request: RunRequest) -> RecordedRun:
    found = RecordedRun(f"vllm {vllm.__version__}", getattr(torch, request.dtype))
    longest = max(map(len, request.prompts)) + request.max_tokens
    options = {"enforce_eager": True, "seed": 0, "max_model_len": longest + 1, "dtype": request.dtype}
    if not torch.cuda.is_available():
        options |= {"kv_cache_memory_bytes": _CPU_CACHE}
    options |= {"max_num_seqs": max(len(request.prompts), 8), "disable_log_stats": True, **request.options}
    process = loader.process_weights_after_loading

    def processed(model: Any, config: Any, *args: Any) -> None:
        """Read the weights before vLLM packs them."""
        request.plant(model)
        found.prints = fingerprints(model, config.dtype)
        process(model, config, *args)

    loader.process_weights_after_loading = processed
    try:
        engine = vllm.LLM(request.model, skip_tokenizer_init=True, **options)
    finally:
        loader.process_weights_after_loading = process
    run = PackedRun(request.most_bytes)

    def follow(worker: Any) -> None:
        vars(getattr(worker, "worker", worker))["_nanwatch"] = _RecordedSteps(run)

    engine.collective_rpc(follow)
    [model] = engine.apply_model(lambda model: model)
    # A seed of a request's own fails on a CPU where prompts come in chunks: its generator has no offset.
    torch.manual_seed(0)
    sampling = {"temperature": 1.0, "max_tokens": request.max_tokens, "ignore_eos": True, **request.sampling}
    asked = vllm.SamplingParams(**{"detokenize": False, "logprobs": 0, **sampling})
    prompts = [{"prompt_token_ids": one} for one in request.prompts]
    with run.recording(model):
        outputs = engine.generate(prompts, asked, use_tqdm=False)
    for one in outputs:
        [answer] = one.outputs
        found.tokens.append([*one.prompt_token_ids, *answer.token_ids])
        found.sampled.append(len(answer.token_ids))
        rows = zip(answer.token_ids, answer.logprobs, strict=True)
        found.logprobs.append([row[token].logprob for token, row in rows])
    config = engine.llm_engine.vllm_config
    found.settings = {
        **flat(config.model_config.hf_text_config.to_dict()),
        **{name: getattr(asked, name) for name in SAMPLER},
        **{name: getattr(getattr(config, part), name) for part, names in _SETTINGS.items() for name in names},
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
    }
    found.settings["kv_cache_dtype"] = found.settings.pop("cache_dtype")
    return found.take_calls(run)


def stale_weights(model: nn.Module, engine: Any) -> list[str]:
    """Return the names of the weights of vLLM's `LLM` whose bits are not those of the trainer's model, in its dtype.

    A part of a fused weight is told by its number. Where the engine runs in a process of its own, it needs
    VLLM_ALLOW_INSECURE_SERIALIZATION=1. Raises ValueError for an engine of several.

    >>> from nanwatch.integrations.vllm_run import stale_weights
    >>> stale_weights(trainer.model, llm)  # doctest: +SKIP
    ['model.layers.3.self_attn.qkv_proj.weight (part 1 of 3)']
    """
    config = engine.llm_engine.vllm_config
    if config.parallel_config.world_size > 1:
        raise ValueError("the engine has parts of its weights in several processes, which cannot be compared")
    [theirs] = engine.apply_model(partial(fingerprints, dtype=config.model_config.dtype))
    return stale(fingerprints(model, config.model_config.dtype), theirs)
