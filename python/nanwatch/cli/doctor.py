"""`nanwatch doctor`, also the default: what is installed, what serves which device, and what is missing."""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..numerics import _extension, _reference
from .commands import COMMANDS, command_parser

_EXAMPLES = """\
exit status: 0, or 1 when the self-check found a difference

examples:
  nanwatch                      versions, devices, and what is missing, as `nanwatch doctor` says
  nanwatch --selfcheck          every implementation against the reference
  nanwatch --json               the same for programs: one JSON document on stdout
  NANWATCH_CPU=avx2 nanwatch    with the CPU part held at AVX2
  nanwatch replay --help        what a command does, and with which options
"""
# Elements of a tensor of the self-check: no multiple of a vector, so that there is a tail.
_SIZE = 4100


def main(arguments: list[str], name: str = "doctor") -> int:
    """Run the command and return the exit status. Without a name its help lists the others."""
    description = "What is installed, which implementation serves which device, and why a part is missing."
    parser = command_parser(name, description, _EXAMPLES)
    parser.add_argument(
        "--selfcheck", action="store_true", help="compare every implementation with the reference"
    )
    if not name:
        parser.add_argument("--version", action="version", version=f"nanwatch {__version__}")
        commands = "\n".join([f"  {command:<10}{summary}" for command, (_, summary) in COMMANDS.items()])
        parser.epilog = f"commands, each with a --help of its own:\n{commands}\n\n{parser.epilog}"
        parser.add_argument("command", nargs="?", metavar="COMMAND", choices=[*COMMANDS])
    options = parser.parse_args(arguments)
    if not name and options.command:
        parser.error(f"the command goes first: {parser.prog} {options.command} ...")
    lines: dict[str, Any] = dict(facts())
    differences = []
    if options.selfcheck:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
            lines["self-check"] = differences = list(_differences())
    if options.json:
        print(json.dumps(lines, indent=2))
        return int(bool(differences))
    for label, words in lines.items():
        for line in (
            [words] if isinstance(words, str) else words or ["every implementation equals the reference"]
        ):
            print(f"{label:<16}{line}")
    return int(bool(differences))


def facts() -> dict[str, str]:
    """Return the lines of the answer by their labels, which are the members of the JSON document."""
    module: Any = _extension.C
    build, info = _extension.build, dict(module.build_info()) if module is not None else {}
    gpu = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda or 'none'}"
    lines = {
        "nanwatch": f"{__version__}, {_extension.__file__.rpartition('/numerics')[0]}",
        "python": f"{platform.python_version()}, {platform.platform()}",
        "torch": f"{torch.__version__}, {gpu}, {torch.get_num_threads()} threads",
        "compiled part": "loaded" if module is not None else f"MISSING: {_extension.reason}",
    }
    if module is not None:
        # A wheel's build names all the versions that it has a module for; the module knows its own.
        lines["built with"] = f"torch {info.get('torch')}, {build.get('compiler') or info.get('compiler')}"
        if " " in build.get("torch", ""):
            lines["also for"] = f"torch {build['torch'].replace(' ', ', ')}"
        lines["CUDA kernels"] = f"CUDA {build.get('cuda')}, {build.get('cuda_archs')}"
        if not module.cuda_compiled():
            lines["CUDA kernels"] = f"no: {build.get('cuda_reason', 'it was built without nvcc')}"
        levels = ", ".join(map(str, module.cpu_capabilities()))
        lines["CPU level"] = f"{module.cpu_capability()} (this machine can run {levels})"
        if warning := str(module.cpu_capability_warning()):
            lines["WARNING"] = warning
    elif not _extension.reason.startswith("switched off"):
        lines["without it"] = "every answer is the same, each takes 10 to 100 times longer"
        lines["to get it"] = f"{_extension.REBUILD}   (in the source tree, after curing the reason)"
    return lines | {str(device): _implementation(device) for device in _devices()}


def _implementation(device: torch.device) -> str:
    """Return what serves the device, and why it is not native."""
    native: Any = _extension.C
    if native is not None and device.type == "cpu":
        return f"native ({native.cpu_capability()})"
    name = f": {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    if native is not None and device.type == "cuda" and native.cuda_compiled():
        return f"native{name}"
    reason = _extension.reason
    if native is not None:
        reason = f"there are no native kernels for {device.type}"
        if device.type == "cuda":
            reason = _extension.build.get("cuda_reason", "the compiled part has no CUDA kernels")
    return f"torch operations: {reason}{name}"


def _devices() -> list[torch.device]:
    """Return the CPU and every accelerator torch can use here."""
    devices = [torch.device("cpu")]
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        devices += [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]
    return devices


def _differences() -> Iterator[str]:
    """Yield where the implementations of this machine differ from the reference, by device, CPU level and dtype."""
    module: Any = _extension.C
    for device in _devices():
        has_levels = module is not None and device.type == "cpu"
        before = module.cpu_capability() if has_levels else ""
        for level in module.cpu_capabilities() if has_levels else [""]:
            try:
                if level:
                    module.set_cpu_capability(level)
                for dtype in sorted(_reference.READABLE_DTYPES, key=str):
                    for words in _of_dtype(dtype, device):
                        yield f"{device} {level}".strip() + f", {dtype}: {words}"
            finally:
                if level:
                    module.set_cpu_capability(before)


def _of_dtype(dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    try:
        torch.empty(1, dtype=dtype, device=device)
    except (RuntimeError, TypeError):  # a dtype that this device lacks
        return
    for x in _tensors(dtype):
        for name in ("abs_range", "health"):
            row, expected = (
                getattr(_extension, name)(x.to(device)[1:]).cpu(),
                getattr(_reference, name)(x[1:]),
            )
            expected = expected.to(row.dtype)  # a device without float64 gives float32 rows
            if not torch.equal(row.nan_to_num(nan=-7.0), expected.nan_to_num(nan=-7.0)):
                yield f"{name} gives {row.tolist()}, the reference {expected.tolist()}"


def _tensors(dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of this dtype. Those of floating point end in a finite value, a nan and an inf."""
    raw = torch.randint(0, 100, (_SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if not (dtype.is_floating_point or dtype.is_complex):
        return [raw.to(dtype)]
    tensors = []
    for last in (1.0, float("nan"), float("inf")):
        x = raw.to(torch.complex64 if dtype.is_complex else torch.float32) / 64
        x[-1] = last
        tensors.append(x.to(dtype))
    return tensors
