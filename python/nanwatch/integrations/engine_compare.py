"""`nanwatch.compare_engine`: a trainer and an inference engine, or two settings of one engine, on the same weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..equivalence.engine_comparison import EngineComparison, compare_runs
from ..numerics.readable import dtype_name
from ..util.progress import Tell, silent
from .run_request import TRIED, EngineError, RunRequest, recorded_runs

__all__ = ["EngineError", "compare_engine"]


def compare_engine(
    model: str | os.PathLike[str],
    prompts: Sequence[str | Sequence[int]],
    engine: str = "vllm",
    *,
    engine_python: str = sys.executable,
    engine_model: str | os.PathLike[str] | None = None,
    dtype: str = "float32",
    options: Mapping[str, Any] | None = None,
    against: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    trainer_options: Mapping[str, Any] | None = None,
    patch: str = "",
    max_tokens: int = 8,
    factor: float = 8.0,
    most_bytes: int = 1 << 30,
    tell: Tell = silent,
) -> EngineComparison:
    """Run a model in transformers and in an inference engine, and name the first module that differs.

    Args:
        model: folder with config and weights, as `save_pretrained` writes it.
        prompts: text, or lists of token ids.
        engine: "vllm", or "transformers" with its cache.
        engine_python: the interpreter of the environment that has the engine. It needs nanwatch too.
        engine_model: another folder for the engine, as after a weight sync.
        dtype: of both sides. In 16 bits both are compared in float32 too.
        options: arguments of the engine, such as `{"enable_prefix_caching": False}`.
        against: run the engine on both sides, A with these options in place of transformers.
        sampling: the engine's sampling parameters. By default temperature 1, with `against` 0.
        trainer_options: arguments of transformers' `from_pretrained`, such as `{"attn_implementation": "eager"}`.
        patch: PKG.MOD:NAME of a function to call with the engine's model, that of B, once it has its weights.
        max_tokens: tokens to sample for each prompt.
        factor: how many times the noise floor a difference must have.
        most_bytes: memory for copies of tensors, per run. Beyond it rows are kept as sketches of 32 numbers.
        tell: called with a line for each thing that begins.

    Each side runs in a process of its own. The engine samples the tokens; transformers reads prompts and answers in one
    forward, as training does. A module's floor is the error of transformers against a run in higher precision.

    Raises ValueError for arguments that make no sense, EngineError where an engine is absent or fails.

    >>> import nanwatch
    >>> found = nanwatch.compare_engine("model", [[5, 6, 7]], engine_python="vllm/bin/python")  # doctest: +SKIP
    >>> found.equal, found.gap.effective  # doctest: +SKIP
    (True, 1.0)
    """
    _check(str(model), prompts, engine, dtype, max_tokens, factor)
    sampling = {**({} if against is None else {"temperature": 0.0}), **(sampling or {})}
    request = RunRequest(
        engine, str(engine_model or model), dtype, [*prompts], None, max_tokens, most_bytes, {**(options or {})},
        sampling, patch,
    )  # fmt: skip
    requests = [replace(request, dtype=one) for one in dict.fromkeys([dtype, "float32"])]
    tell(f"running {engine}")
    served = recorded_runs(requests, engine_python)
    trainer = replace(
        request, engine="transformers", model=str(model), options={**(trainer_options or {})}, patch=""
    )
    # In its own precision, in that of the engine, whose options may say another, and for the floor in a higher one.
    asked = {
        (i, name): replace(trainer, dtype=name, prompts=run.tokens, sampled=run.sampled, max_tokens=0)
        for i, run in enumerate(served)
        for own in [dtype_name(run.dtype)]
        for name in (requests[i].dtype, own, "float64" if own == "float32" else "float32")
    }
    tell("running transformers")
    read = dict(zip(asked, recorded_runs([*asked.values()], sys.executable), strict=True))
    reference = [read[i, one.dtype] for i, one in enumerate(requests)]
    if against is not None:
        tell(f"running {engine} with other settings")
        others = [replace(one, options={**one.options, **against}, patch="") for one in requests]
        reference = recorded_runs(others, engine_python)
    tell("comparing")
    found = compare_runs(
        *((reference[i], run, lambda kind, i=i: read[i, dtype_name(kind)]) for i, run in enumerate(served)),
        factor=factor,
    )
    if served[0].engine.split()[1] in TRIED[engine]:
        return found
    untried = f"B is {served[0].engine}, and this was tried with {', '.join(TRIED[engine])}"
    return replace(found, remarks=(*found.remarks, untried))


def _check(
    model: str, prompts: Sequence[Any], engine: str, dtype: str, max_tokens: int, factor: float
) -> None:
    is_folder, dtypes = os.path.isfile(os.path.join(model, "config.json")), ("float32", "bfloat16", "float16")
    for is_right, words in (
        (engine in TRIED, f"engine should be one of {', '.join(TRIED)}, got {engine!r}"),
        (is_folder, f"{model} should be a folder with config.json and weights, as save_pretrained writes it"),
        (
            not isinstance(prompts, str) and prompts and all(prompts),
            "prompts should be a list of texts or of lists of token ids, none of them empty",
        ),
        (dtype in dtypes, f"dtype should be {', '.join(dtypes)}, got {dtype!r}"),
        (max_tokens > 0, f"max_tokens should be at least 1, got {max_tokens}"),
        (factor > 1, f"factor should be above 1, the noise floor itself, got {factor}"),
    ):
        if not is_right:
            raise ValueError(words)
