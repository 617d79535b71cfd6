"""`nanwatch recipe`: the cheapest number formats of a model's linear layers whose loss stays within a budget."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..blackbox.errors import module_of
from ..equivalence.recipes.recipe import recipe
from ..precision.emulation import HADAMARD_SIZES, TARGETS
from ..util.progress import Tell
from ..util.visible import visible
from .commands import UseError, answered, below, command_parser, imported

_RECIPE = """\
MODEL and BATCH are FILE.py:NAME or PKG.MOD:NAME: an object, or what makes it when called without arguments. A BATCH
without a colon is a name in MODEL's file. It is a dict by name, a tuple by position, or the only argument, and the
model's output is its loss, or has it as .loss, ["loss"] or first part. Both are imported from the current directory
too, which runs their code.

With --output each measurement is kept beside FILE, in NAME.measured.jsonl. The same command goes on from there after it
was interrupted, and another --loss-budget needs few runs more.

exit status: 0 with a recipe, 1 when no layer can be narrower within the budget, 2 when the model cannot be run

examples:
  nanwatch recipe model.py:model batch --to mxfp8,nvfp4,bfloat16 --loss-budget 0.5%
  nanwatch recipe model.py:model batch --train --hadamard --stochastic --output recipe.json
"""


def main(arguments: list[str]) -> int:
    """Run `nanwatch recipe` and return the exit status."""
    parser = command_parser(
        "recipe",
        "Try number formats on the linear layers of a model, one by one and together, by emulation, and find the"
        " cheapest with which the loss of a batch stays within a budget.",
        _RECIPE,
    )
    parser.add_argument("model", metavar="MODEL", help="the model, or what makes it")
    parser.add_argument("batch", metavar="BATCH", help="its arguments, with labels, or what makes them")
    parser.add_argument(
        "--to",
        default="mxfp8,nvfp4,bfloat16",
        metavar="FORMATS",
        help=f"the formats to try, with commas between them (default: %(default)s); known are {', '.join(TARGETS)}",
    )
    parser.add_argument(
        "--loss-budget",
        default="0.5%",
        metavar="SHARE",
        help="how far the loss may move, as 0.5%% or 0.005 (default: 0.5%%)",
    )
    parser.add_argument(
        "--train", action="store_true", help="round the operands of the two backward matmuls too"
    )
    parser.add_argument(
        "--hadamard",
        nargs="?",
        type=int,
        choices=HADAMARD_SIZES,
        const=HADAMARD_SIZES[0],
        default=0,
        help="rotate blocks of so many elements before they are rounded (without a number: 16)",
    )
    parser.add_argument(
        "--stochastic", action="store_true", help="round gradients up or down by chance, with --train"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the recipe as JSON")
    if "--loss-budget" in arguments[:-1]:  # argparse would take -1% for an option
        at = arguments.index("--loss-budget")
        arguments = [*arguments[:at], "=".join(arguments[at : at + 2]), *arguments[at + 2 :]]
    options = parser.parse_args(arguments)
    output: Path | None = options.output

    def find(tell: Tell) -> tuple[str, int]:
        if output is not None and output.is_dir():
            raise UseError(
                f"--output should be a file, got the folder {output}; try {output / 'recipe.json'}"
            )
        file = options.model.partition(":")[0]
        batch = options.batch if ":" in options.batch else f"{file}:{options.batch}"
        model = imported(options.model, "MODEL")
        try:
            found = recipe(
                model,
                imported(batch, "BATCH"),
                options.to.split(","),
                loss_budget=options.loss_budget,
                train=options.train,
                hadamard=options.hadamard,
                stochastic=options.stochastic,
                journal=None if output is None else output.with_suffix(".measured.jsonl"),
                tell=tell,
            )
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            if where := module_of(error, model if isinstance(model, nn.Module) else None):
                raise UseError(
                    f"{type(error).__name__} in {where}: {error}; does BATCH suit MODEL?"
                ) from None
            raise
        wrote = ""
        if output is not None:
            output.write_text(found.to_json() + "\n", encoding="utf-8")
            wrote = f"wrote {visible(str(output))}"
        text = found.to_json() if options.json else below(found.to_text(), wrote)
        return text, int(not found.formats)

    return answered("recipe", find, errors=(TypeError, RuntimeError))
