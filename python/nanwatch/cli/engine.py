"""`nanwatch compare --engine`: a trainer against an inference engine, or two settings of one engine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..integrations.engine_compare import compare_engine
from ..integrations.run_request import TRIED
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
    # Without a value, the default of compare_engine counts.
    words = {"argument_default": argparse.SUPPRESS}
    given = parser.add_argument_group("what is compared", **words)
    given.add_argument("--engine", choices=[*TRIED], required=True, help="the engine")
    given.add_argument("--engine-python", metavar="PATH", help="its interpreter (default: this one)")
    given.add_argument("--engine-model", metavar="DIR", help="another folder of weights for the engine")
    given.add_argument("--dtype", help="of both sides (default: float32)")
    for name, what in (
        ("--option", "arguments of the engine; a value is JSON or a word"),
        ("--against", "compare with the engine under these arguments"),
        ("--sampling", "sampling parameters of the engine"),
        ("--trainer-option", "arguments of transformers' from_pretrained"),
    ):
        dest = name.strip("-").replace("-", "_") + "s" * name.endswith("option")
        given.add_argument(
            name, dest=dest, type=_setting, metavar="NAME=VALUE", nargs="+", action="extend", help=what
        )
    given.add_argument("--patch", metavar="PKG.MOD:NAME", help="function to call with the engine's model")
    given.add_argument("--max-tokens", type=int, metavar="N", help="tokens to sample (default: 8)")
    given.add_argument("--factor", type=float, help="noise floors a difference must have (default: 8)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page with charts there")
    options = parser.parse_args(arguments)
    asked = {name: one for name, one in vars(options).items() if name not in ("prompts", "json", "html")}
    asked |= {name: dict(one) for name, one in asked.items() if isinstance(one, list)}

    def find(tell: Tell) -> tuple[str, int]:
        found = compare_engine(prompts=read_prompts(options.prompts), tell=tell, **asked)
        return rendered(found, options, tell), EQUAL_STATUS[found.equal]

    return answered("compare", find, errors=(TypeError, RuntimeError))


def read_prompts(path: Path) -> list[str | list[int]]:
    """Return the prompts of a file, one of each line that is not empty: token ids where it is a JSON list."""
    found: list[str | list[int]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            ids = json.loads(line) if line.lstrip().startswith("[") else line
        except ValueError:
            ids = line  # text that begins with a bracket
        if not isinstance(ids, str) and not (ids and all(type(one) is int and one >= 0 for one in ids)):
            raise UseError(
                f"{path}, line {number}: token ids should be numbers from 0, as [5, 17, 3], got {line}"
            )
        found += [ids] if line.strip() else []
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
