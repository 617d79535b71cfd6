"""Run of vLLM's model for `nanwatch compare --engine vllm`, in this process, with the rows of every step."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch

from ..equivalence.packed import PackedRun, Places
from ..equivalence.recorded_run import RecordedRun, fingerprints, keep_portable
from .run_request import RunRequest, flat, patch_of
from .serving import Share
from .vllm import WORKER_MODULE, StepShares, patch

# The engine in this process, where its model and its steps can be seen.
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
_CPU_CACHE = 1 << 28
_SAMPLER = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class _RecordedSteps(StepShares):
    """Steps of a worker, told to a run. Takes the place of the plugin's watched model."""

    def __init__(self, run: PackedRun, found: RecordedRun) -> None:
        super().__init__()
        self._run = run
        self._found = found
        self._step = 0

    def start(self, model: Any) -> None:
        """Do nothing: the model is recorded from the first step on."""

    def stop(self) -> None:
        """Do nothing: the model is let go with the engine."""

    def step_begins(self, ask: Callable[[], Sequence[Share]]) -> None:
        """Begin a step of the run."""

        def places() -> Places:
            # vLLM numbers the requests of an engine from 0, and puts letters of its own behind.
            parts = [(int(one.request.split("-")[0]), one.position, one.num_tokens) for one in ask()]
            found = Places.of(parts)
            for place in found.tokens.tolist():
                self._found.steps.setdefault(place, self._step)
            return found

        self._run.step_begins(places)

    def step_ended(self, *outputs: object) -> None:
        """End the step."""
        self._run.step_ended()
        self._step += 1


def record(request: RunRequest) -> Iterator[RecordedRun]:
    """Yield a run for each that is asked for; vLLM samples the tokens itself."""
    os.environ.update(_ENVIRONMENT)
    vllm: Any = import_module("vllm")
    base_loader: Any = import_module("vllm.model_executor.model_loader.base_loader")
    import_module(WORKER_MODULE)
    patch()
    process = base_loader.process_weights_after_loading
    for asked in request.runs:
        found = RecordedRun(f"vllm {vllm.__version__}", getattr(torch, asked.dtype))

        def processed(model: Any, *args: Any, found: RecordedRun = found) -> None:
            """Read the weights before vLLM packs them."""
            if request.patch:
                patch_of(request.patch)(model)
            found.prints = fingerprints(model)
            keep_portable(model)
            process(model, *args)

        base_loader.process_weights_after_loading = processed
        try:
            yield _recorded(vllm, request, asked.dtype, found)
        finally:
            base_loader.process_weights_after_loading = process
        gc.collect()


def _recorded(vllm: Any, request: RunRequest, dtype: str, found: RecordedRun) -> RecordedRun:
    longest = max(map(len, request.prompts)) + request.max_tokens
    options = {"enforce_eager": True, "seed": request.seed, "max_model_len": longest + 1, "dtype": dtype}
    if not torch.cuda.is_available():
        options |= {"kv_cache_memory_bytes": _CPU_CACHE}
    options |= {"max_num_seqs": max(len(request.prompts), 8), "disable_log_stats": True, **request.options}
    engine = vllm.LLM(request.model, skip_tokenizer_init=True, **options)
    run = PackedRun(request.most_bytes)
    steps = _RecordedSteps(run, found)

    def follow(worker: Any) -> None:
        vars(getattr(worker, "worker", worker))["_nanwatch"] = steps

    engine.collective_rpc(follow)
    [model] = engine.apply_model(lambda model: model)
    # A seed of a request's own fails on a CPU where prompts come in chunks: its generator has no offset.
    torch.manual_seed(request.seed)
    sampling = {
        "temperature": 1.0,
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
    }
    asked = vllm.SamplingParams(**{**sampling, "detokenize": False, "logprobs": 0, **request.sampling})
    with run.recording(model):
        outputs = engine.generate(
            [{"prompt_token_ids": one} for one in request.prompts], asked, use_tqdm=False
        )
    for one in outputs:
        [answer] = one.outputs
        tokens = list(answer.token_ids)
        found.tokens.append([*one.prompt_token_ids, *tokens])
        found.sampled.append(len(tokens))
        found.logprobs.append(
            [row[token].logprob for token, row in zip(tokens, answer.logprobs, strict=True)]
        )
    found.settings = _settings(engine.llm_engine.vllm_config, asked)
    found.take_calls(run)
    return found


def _settings(config: Any, asked: Any) -> dict[str, Any]:
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    return {
        **flat(model.hf_text_config.to_dict()),
        **{name: getattr(asked, name) for name in _SAMPLER},
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "enforce_eager": model.enforce_eager,
        "logprobs_mode": model.logprobs_mode,
        "kv_cache_dtype": cache.cache_dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "block_size": cache.block_size,
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
    }
