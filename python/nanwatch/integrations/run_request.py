"""Requests for recorded runs, which travel to a process of another environment; and that process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..equivalence.recorded_run import RecordedRun

# Versions that the recording was tried with.
TRIED = {"vllm": ("0.32.0",), "transformers": ("5.19.0", "5.24.0")}
# Sampling parameters that change log-probabilities, and the values that leave them as they are.
SAMPLER = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
           "presence_penalty": 0.0, "frequency_penalty": 0.0}  # fmt: skip
# Settings of a config that say nothing of numbers.
_QUIET = ("transformers_version", "_name_or_path", "torch_dtype", "architectures", "use_cache")


class EngineError(RuntimeError):
    """An engine that is absent, does not take the model, or failed; the text names the versions tried."""


@dataclass
class RunRequest:
    """Request for a run of the model in a folder over `prompts`, which are token ids or text.

    The last `sampled` tokens of each are answers. Without `sampled`, the engine samples `max_tokens`. `options` are the
    engine's own. `patch` is PKG.MOD:NAME of a function that is called with the model once it has its weights.
    """

    engine: str
    model: str
    dtype: str
    prompts: list[Any]
    sampled: list[int] | None = None
    max_tokens: int = 0
    most_bytes: int = 1 << 30
    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    patch: str = ""

    def tokenize(self) -> None:
        """Replace prompts that are text by their token ids."""
        if any(isinstance(one, str) for one in self.prompts):
            ids = import_module("transformers").AutoTokenizer.from_pretrained(self.model)
            self.prompts = [ids(one)["input_ids"] if isinstance(one, str) else one for one in self.prompts]

    def plant(self, model: Any) -> None:
        """Call the function of `patch`, which may lie in the current folder."""
        if self.patch:
            module, _, name = self.patch.partition(":")
            sys.path.insert(0, os.getcwd())
            plant: Callable[[Any], Any] = getattr(import_module(module), name)
            plant(model)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings of a config by name, those of a part of it as "part.name"."""
    found: dict[str, Any] = {}
    for name, one in config.items():
        if isinstance(one, Mapping):
            found |= flat(one, f"{prefix}{name}.")
        elif isinstance(one, bool | int | float | str | type(None)) and name not in _QUIET:
            found[f"{prefix}{name}"] = one
    return found


def recorded_runs(requests: Sequence[RunRequest], python: str) -> list[RecordedRun]:
    """Make the runs, all of one engine, in a process of their own. Raises EngineError."""
    with tempfile.TemporaryDirectory(prefix="nanwatch-engine-") as folder:
        runs, error = Path(folder, "runs"), Path(folder, "error")
        torch.save(requests, Path(folder, "requests"))
        # A watch of its own would be inside the recorded calls.
        environment = {"NANWATCH": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [python, "-m", __name__, folder]
        try:
            done = subprocess.run(
                command,
                env=os.environ | environment,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as refused:
            raise EngineError(f"{python} does not start: {refused}; name one with --engine-python") from None
        if done.returncode == 0:
            found: list[RecordedRun] = torch.load(runs, weights_only=False)
            return found
        why = error.read_text(encoding="utf-8") if error.exists() else ended(python, done.stderr)
        raise EngineError(f"{why}; tried with {requests[0].engine} {', '.join(TRIED[requests[0].engine])}")


def ended(python: str, stderr: str) -> str:
    """Return in words why a process ended that could not say it."""
    last = stderr.strip().rpartition("\n")[2] or "it printed nothing"
    if "nanwatch" in last and "No module named" in last:
        return f"{python} has no nanwatch: install it there too, or set PYTHONPATH"
    return f"the engine ended in {python}: {last}"


def main(folder: str) -> int:
    """Make the runs of the `requests` in the folder. Write them to `runs`, or why not to `error`."""
    requests: list[RunRequest] = torch.load(Path(folder, "requests"), weights_only=False)
    engine, version = requests[0].engine, ""
    try:
        version = getattr(import_module(engine), "__version__", "")
        record = import_module(f".{engine}_run", __package__).record
        torch.save([*record(requests)], Path(folder, "runs"))
    except Exception as error:
        import traceback

        traceback.print_exc()
        said = textwrap.shorten(f"{type(error).__name__}: {error}", 300)  # pydantic's first line says nothing
        why = f"{engine} {version} does not run {requests[0].model}: {said}"
        if isinstance(error, ImportError) and not version:
            why = f"{engine} is not in the environment of {sys.executable} ({said}): name the interpreter that has it"
            why += " with --engine-python, engine_python="
        Path(folder, "error").write_text(why, encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
