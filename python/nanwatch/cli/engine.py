"""`nanwatch compare --engine`: a trainer against an inference engine, or two settings of one engine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..equivalence.engine_comparison import EngineComparison
from ..integrations.engine_compare import TRIED, compare_engine
from ..util.progress import Tell
from .commands import EQUAL_STATUS, UseError, answered, command_parser, rendered

_EPILOG = """\
PROMPTS has a prompt in each line: text, or token ids as [5, 17, 3]. transformers runs in this environment, the
engine in that of --engine-python, each in a process of its own.

exit status: 0 when they are equal, 1 when something is above the noise floor, a weight is stale or the reported
log-probabilities are others, 2 when they cannot be compared

examples:
  nanwatch compare --engine vllm model/ prompts.txt --engine-python vllm/bin/python
  nanwatch compare --engine vllm model/ prompts.txt --dtype bfloat16 --html gap.html
  nanwatch compare --engine vllm model/ prompts.txt --against enable_prefix_caching=false
  nanwatch compare --engine vllm model/ prompts.txt --engine-model synced/
"""


def engine_main(arguments: list[str]) -> int:
    """Run `nanwatch compare --engine` and return the exit status."""
    parser = command_parser(
        "compare",
        "Run a model in transformers and in an inference engine on the same weights and prompts. Name the first module"
        " that differs by more than rounding does, and say what it does to the log-probabilities of sampled tokens.",
        _EPILOG,
    )
    parser.add_argument("model", metavar="MODEL_DIR", help="folder with config and weights")
    parser.add_argument("prompts", metavar="PROMPTS", type=Path, help="file with a prompt in each line")
    parser.add_argument("--engine", choices=[*TRIED], required=True, help="the engine")
    parser.add_argument(
        "--engine-python", metavar="PATH", default=sys.executable, help="its interpreter (default: this one)"
    )
    parser.add_argument("--engine-model", metavar="DIR", help="another folder of weights for the engine")
    parser.add_argument("--dtype", default="float32", help="of both sides (default: %(default)s)")
    pairs: dict[str, Any] = {"type": _setting, "metavar": "NAME=VALUE", "nargs": "+", "action": "extend"}
    parser.add_argument(
        "--option", **pairs, default=[], help="arguments of the engine; a value is JSON or a word"
    )
    parser.add_argument("--against", **pairs, help="compare with the engine under these arguments")
    parser.add_argument("--sampling", **pairs, default=[], help="sampling parameters of the engine")
    parser.add_argument(
        "--trainer-option", **pairs, default=[], help="arguments of transformers' from_pretrained"
    )
    parser.add_argument(
        "--patch", metavar="PKG.MOD:NAME", default="", help="function to call with the engine's model"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=8, metavar="N", help="tokens to sample (default: 8)"
    )
    parser.add_argument(
        "--factor", type=float, default=8.0, help="noise floors a difference must have (default: 8)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page with charts there")
    options = parser.parse_args(arguments)

    def find(tell: Tell) -> tuple[str, int]:
        found: EngineComparison = compare_engine(
            options.model,
            read_prompts(options.prompts),
            options.engine,
            engine_python=options.engine_python,
            engine_model=options.engine_model,
            dtype=options.dtype,
            options=dict(options.option),
            against=None if options.against is None else dict(options.against),
            sampling=dict(options.sampling),
            trainer_options=dict(options.trainer_option),
            patch=options.patch,
            max_tokens=options.max_tokens,
            factor=options.factor,
            tell=tell,
        )
        return rendered(found, options, tell), EQUAL_STATUS[found.equal]

    return answered("compare", find, errors=(TypeError, RuntimeError))


def read_prompts(path: Path) -> list[str | list[int]]:
    """Return the prompts of a file, one of each line that is not empty."""
    found: list[str | list[int]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("["):
            found.append(line)
            continue
        try:
            ids = json.loads(line)
        except ValueError:
            found.append(line)  # text that begins with a bracket
            continue
        if not ids or not all(type(one) is int and one >= 0 for one in ids):
            raise UseError(
                f"{path}, line {number}: token ids should be numbers from 0, as [5, 17, 3], got {line}"
            )
        found.append(ids)
    if not found:
        raise UseError(
            f"{path} has no prompt: write one in each line, as text or as token ids like [5, 17, 3]"
        )
    return found


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"should be NAME=VALUE, as max_num_seqs=8, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
