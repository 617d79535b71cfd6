"""`nanwatch.compare_engine`: a trainer and an inference engine, or two settings of one engine, on the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..equivalence.engine_comparison import EngineComparison, Measure, compare_runs
from ..equivalence.recorded_run import RecordedRun
from ..numerics.readable import dtype_name
from ..util.progress import Tell, silent
from .run_request import AskedRun, RunRequest

# Versions that the recording was tried with.
TRIED = {"vllm": ("0.32.0",), "transformers": ("5.19.0", "5.24.0")}


class EngineError(RuntimeError):
    """An engine that is absent, does not take the model, or failed; the text names the versions tried."""


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
        patch: PKG.MOD:NAME of a function to call with the engine's model once it has its weights.
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
    high = {"float32": "float64"}
    dtypes = [dtype] if dtype == "float32" else [dtype, "float32"]
    request = RunRequest(engine, str(engine_model or model), [AskedRun(one) for one in dtypes])
    request.prompts, request.max_tokens, request.most_bytes = list(prompts), max_tokens, most_bytes
    request.options, request.patch = {**(options or {})}, patch
    request.sampling = {**({} if against is None else {"temperature": 0.0}), **(sampling or {})}
    tell(f"running {engine}")
    served = _made(request, engine_python)
    wanted = [
        (i, name)
        for i, run in enumerate(served)
        for own in [dtype_name(run.dtype)]
        for name in dict.fromkeys([dtypes[i], own, high.get(own, "float32")])
    ]
    tell("running transformers")
    runs = [AskedRun(name, served[i].tokens, served[i].sampled) for i, name in wanted]
    trainer = RunRequest("transformers", str(model), runs, most_bytes=most_bytes)
    trainer.options = {**(trainer_options or {})}
    read = _made(trainer, sys.executable)
    trained = dict(zip(wanted, read, strict=True))
    reference = [trained[i, name] for i, name in enumerate(dtypes)]
    if against is not None:
        tell(f"running {engine} with other settings")
        reference = _made(replace(request, patch="", options={**request.options, **against}), engine_python)

    def of(i: int) -> tuple[RecordedRun, RecordedRun, Measure]:
        return reference[i], served[i], lambda kind: trained[i, dtype_name(kind)]

    tell("comparing")
    return compare_runs(*of(0), factor=factor, copies=(lambda: of(1)) if len(dtypes) > 1 else None)


def _check(
    model: str, prompts: Sequence[Any], engine: str, dtype: str, max_tokens: int, factor: float
) -> None:
    if engine not in TRIED:
        raise ValueError(f"engine should be one of {', '.join(TRIED)}, got {engine!r}")
    if not os.path.isfile(os.path.join(model, "config.json")):
        raise ValueError(
            f"{model} should be a folder with config.json and weights, as save_pretrained writes it"
        )
    if isinstance(prompts, str) or not prompts or not all(prompts):
        raise ValueError("prompts should be a list of texts or of lists of token ids, none of them empty")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype should be float32, bfloat16 or float16, got {dtype!r}")
    if max_tokens < 1 or not factor > 1:
        raise ValueError(f"max_tokens should be at least 1 and factor above 1, got {max_tokens} and {factor}")


def _made(request: RunRequest, python: str) -> list[RecordedRun]:
    """Make the runs in a process of their own."""
    with tempfile.TemporaryDirectory(prefix="nanwatch-engine-") as folder:
        place = Path(folder)
        (place / "request.json").write_text(request.to_json(), encoding="utf-8")
        # A watch of its own would be inside the recorded calls.
        environment = {
            **os.environ,
            "NANWATCH": "0",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [python, "-m", "nanwatch.integrations.run_request", folder]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", check=False
            )
        except OSError as error:
            raise EngineError(
                f"{python} does not start: {error}; name an interpreter with --engine-python"
            ) from None
        if done.returncode:
            raise EngineError(_why(request, python, place / "error.json", done.stderr))
        return [RecordedRun.load(place / f"{number}.pt") for number in range(len(request.runs))]


def _why(request: RunRequest, python: str, file: Path, stderr: str) -> str:
    tried = f"tried with {request.engine} {', '.join(TRIED[request.engine])}"
    if not file.exists():
        last = stderr.strip().rpartition("\n")[2] or "it printed nothing"
        if "nanwatch" in last and "No module named" in last:
            return f"{python} has no nanwatch: install it there too, or set PYTHONPATH; {tried}"
        return f"{request.engine} ended in {python}: {last}; {tried}"
    said = json.loads(file.read_text(encoding="utf-8"))
    if said["is_absent"]:
        return (
            f"{request.engine} is not in the environment of {python} ({said['error']}): name the interpreter that has"
            f" it with --engine-python, engine_python=; {tried}"
        )
    version = said["version"]
    is_other = version and version not in TRIED[request.engine]
    other = f" This is {version}." if is_other else ""
    return (
        f"{request.engine} {version} does not run {request.model}: {said['error']}; {tried}.{other}".rstrip(
            "."
        )
    )
