"""`nanwatch scan`: is a checkpoint sound, and how does it differ from another?"""

from __future__ import annotations

from ..scan.scan import scan
from ..util.progress import Tell
from .commands import answered, command_parser, rendered

_SCAN = """\
FILE is a file of safetensors, torch.save (.pt, .pth, .bin, .ckpt), GGUF or NumPy (.npz, .npy), an index of such files,
or a folder with these or of torch.distributed.checkpoint. Nothing in a file is run: a pickle that would run code is
refused.

exit status: 0 when it is sound, 1 when OTHER does not have the same numbers, 2 when there is nothing to read or to
check, 3 when a value is nan or inf or a file is damaged

examples:
  nanwatch scan model.safetensors
  nanwatch scan checkpoints/step-1000
  nanwatch scan hf/model.safetensors.index.json --against converted.gguf
  nanwatch scan model.safetensors --to float16,mxfp8 --json
"""


def main(arguments: list[str]) -> int:
    """Run `nanwatch scan` and return the exit status."""
    description = (
        "Read each tensor of a checkpoint and name what is nan, inf, dead, far from its siblings, or lost in a"
        " damaged file."
    )
    parser = command_parser("scan", description, _SCAN)
    parser.add_argument("files", metavar="FILE", nargs="+", help="the files of one checkpoint, or its folder")
    parser.add_argument(
        "--against", metavar="OTHER", help="tell which tensors of this checkpoint differ, and how far"
    )
    parser.add_argument(
        "--to", metavar="FORMATS", help="try these number formats on each matrix, such as float16,mxfp8"
    )
    options = parser.parse_args(arguments)

    def find(tell: Tell) -> tuple[str, int]:
        result = scan(*options.files, against=options.against, to=options.to or (), tell=tell)
        status = int(not result.is_faithful) if result.is_checked else 2
        return rendered(result, options, tell), status if result.is_sound else 3

    return answered("scan", find)
