"""Request for recorded runs, which travels as JSON to a process of another environment; and that process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from ..util.visible import spell


@dataclass
class AskedRun:
    """One run: its dtype, and the tokens to read, of which the last `sampled` of each request are answers.

    Without tokens, they are sampled.
    """

    dtype: str
    tokens: list[list[int]] | None = None
    sampled: list[int] = field(default_factory=list)


@dataclass
class RunRequest:
    """Request to a process: the folder of the model, prompts as token ids or as text, and runs.

    `options` are the engine's own. `patch` is PKG.MOD:NAME of a function that is called with the model once it has its
    weights.
    """

    engine: str
    model: str
    runs: list[AskedRun]
    prompts: list[Any] = field(default_factory=list)
    max_tokens: int = 8
    seed: int = 0
    most_bytes: int = 1 << 30
    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    patch: str = ""

    def to_json(self) -> str:
        """Return the request as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunRequest:
        """Read what `to_json` has written."""
        read = json.loads(text)
        return cls(**{**read, "runs": [AskedRun(**one) for one in read["runs"]]})

    def tokenize(self) -> None:
        """Replace prompts that are text by their token ids."""
        if any(isinstance(one, str) for one in self.prompts):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.model)
            self.prompts = [
                tokenizer(one)["input_ids"] if isinstance(one, str) else one for one in self.prompts
            ]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings of a config by name, those of a part of it as "part.name"."""
    found: dict[str, Any] = {}
    for name, one in config.items():
        if isinstance(one, Mapping):
            found |= flat(one, f"{prefix}{name}.")
        elif isinstance(one, bool | int | float | str | type(None)):
            found[f"{prefix}{name}"] = one
    return found


def patch_of(place: str) -> Callable[[Any], Any]:
    """Return the function that PKG.MOD:NAME names, also from the current folder."""
    module, _, name = place.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: Callable[[Any], Any] = getattr(import_module(module), name)
    return found


def main(folder: str) -> int:
    """Make the runs that `request.json` in the folder asks for. Write them there, or `error.json`."""
    place = Path(folder)
    request = RunRequest.from_json((place / "request.json").read_text(encoding="utf-8"))
    version = ""
    try:
        if request.engine != "transformers":
            version = getattr(import_module(request.engine), "__version__", "")
        request.tokenize()
        record = import_module(f".{request.engine}_run", __package__).record
        for number, run in enumerate(record(request)):
            run.save(place / f"{number}.pt")
    except Exception as error:
        import traceback

        traceback.print_exc()
        is_absent = isinstance(error, ImportError) and not version and request.engine != "transformers"
        said = {"error": spell(error), "version": version, "is_absent": is_absent}
        (place / "error.json").write_text(json.dumps(said), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
