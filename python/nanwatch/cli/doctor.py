"""`nanwatch doctor`, also the default: what is installed, what serves which device, and what is missing."""

from __future__ import annotations

import argparse
import json
import platform
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..numerics import _extension, _reference
from .commands import command_parser

_EXAMPLES = """\
exit status: 0, or 1 when the self-check found a difference

examples:
  nanwatch doctor                      versions, devices, and what is missing
  nanwatch doctor --selfcheck          every implementation against the reference
  nanwatch doctor --json               the same for programs
  NANWATCH_CPU=avx2 nanwatch doctor    with the CPU part held at AVX2
"""


# Elements of a tensor of the self-check: no multiple of a vector, so that there is a tail.
_SIZE = 4100


@dataclass(frozen=True)
class Outcome:
    """Result for one implementation and one dtype: how many tensors were compared, and the error or ""."""

    implementation: str
    dtype: str
    cases: int
    error: str = ""
    skipped: str = ""


def _cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _openmp_libraries() -> list[str]:
    """Return the OpenMP runtimes in this process. Two of them mean two pools of threads that compete."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted(set(re.findall(r"/\S*lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", maps)))


def _device_facts(device: torch.device) -> dict[str, str]:
    facts = {"device": str(device), "name": "", "implementation": "torch operations", "reason": ""}
    if device.type == "cpu":
        facts["name"] = _cpu_name()
    elif device.type == "cuda":
        facts["name"] = torch.cuda.get_device_name(device)
    if _has_kernel(device):
        level = (
            f" ({_extension.C.cpu_capability()})" if device.type == "cpu" and _extension.C is not None else ""
        )
        facts["implementation"] = f"native{level}"
    elif _extension.C is None:
        facts["reason"] = _extension.reason
    elif device.type == "cuda":
        facts["reason"] = _extension.build.get("cuda_reason", "the compiled part has no CUDA kernels")
    else:
        facts["reason"] = f"there are no native kernels for {device.type}"
    return facts


def facts() -> dict[str, Any]:
    """Return the document of `--json`, without the self-check."""
    module: Any = _extension.C
    return {
        "nanwatch": {"version": __version__, "path": str(Path(__file__).parents[1])},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": {
            "version": str(torch.__version__),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        },
        "compiled": {
            "loaded": module is not None,
            "reason": _extension.reason,
            "cuda": bool(module is not None and module.cuda_compiled()),
            "build": _extension.build,
            "info": dict(module.build_info()) if module is not None else {},
        },
        "cpu": {
            "capability": str(module.cpu_capability()) if module is not None else None,
            "capabilities": [str(level) for level in module.cpu_capabilities()] if module is not None else [],
            "warning": str(module.cpu_capability_warning()) if module is not None else "",
            "threads": torch.get_num_threads(),
            "openmp": _openmp_libraries(),
        },
        "devices": [_device_facts(device) for device in _devices()],
    }


def _cuda_part(compiled: dict[str, Any]) -> str:
    build = compiled["build"]
    if compiled["cuda"]:
        return (
            f"CUDA {build.get('cuda', 'version unknown')}, {build.get('cuda_archs', 'architectures unknown')}"
        )
    if not compiled["loaded"]:
        return "no"
    return f"no: {build.get('cuda_reason', 'it was built without nvcc')}"


def _lines(found: dict[str, Any]) -> list[str]:
    compiled, cpu, torch_facts = found["compiled"], found["cpu"], found["torch"]
    gpu = f"CUDA {torch_facts['cuda']}" if torch_facts["cuda"] else "no CUDA"
    if torch_facts["hip"]:
        gpu = f"ROCm {torch_facts['hip']}"
    rows = [
        ("nanwatch", f"{found['nanwatch']['version']}, {found['nanwatch']['path']}"),
        ("python", f"{found['python']}, {found['platform']}"),
        ("torch", f"{torch_facts['version']}, {gpu}"),
        ("compiled part", "loaded" if compiled["loaded"] else f"MISSING: {compiled['reason']}"),
    ]
    if compiled["loaded"]:
        # A wheel's build names all the versions that it has a module for; the module knows its own.
        built = compiled["build"].get("torch", "")
        built = compiled["info"].get("torch", "unknown") if not built or " " in built else built
        compiler = compiled["build"].get("compiler") or compiled["info"].get("compiler", "compiler unknown")
        rows.append(("  built with", f"torch {built}, {compiler}"))
        if " " in compiled["build"].get("torch", ""):
            rows.append(("  also for", f"torch {compiled['build']['torch'].replace(' ', ', ')}"))
        rows.append(("  CUDA kernels", _cuda_part(compiled)))
        rows.append(
            ("  CPU level", f"{cpu['capability']} (this machine can run {', '.join(cpu['capabilities'])})")
        )
        if cpu["warning"]:
            rows.append(("  WARNING", cpu["warning"]))
    elif not compiled["reason"].startswith("switched off"):
        rows.append(("  without it", "every answer is the same, each takes 10 to 100 times longer"))
        rows.append(("  to get it", f"{_extension.REBUILD}   (in the source tree, after curing the reason)"))
    rows.append(("threads", f"{cpu['threads']}, OpenMP: {', '.join(cpu['openmp']) or 'none found'}"))
    if len(cpu["openmp"]) > 1:
        rows.append(
            ("  WARNING", "several OpenMP runtimes are loaded: their threads compete for the same cores")
        )
    for device in found["devices"]:
        why = f": {device['reason']}" if device["reason"] else ""
        rows.append((device["device"], f"{device['implementation']}{why}   [{device['name']}]"))
    return [f"{label:<16}{value}" for label, value in rows]


@contextmanager
def _held_at(capability: str) -> Iterator[None]:
    module: Any = _extension.C
    if not capability or module is None:
        yield
        return
    before = module.cpu_capability()
    module.set_cpu_capability(capability)
    try:
        yield
    finally:
        module.set_cpu_capability(before)


def _devices() -> list[torch.device]:
    """Return the CPU and every accelerator torch can use here."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps"))
    if torch.xpu.is_available():
        devices += [torch.device("xpu", index) for index in range(torch.xpu.device_count())]
    return devices


def _has_kernel(device: torch.device) -> bool:
    """Return whether the dispatcher has a native kernel of ours for the device's plain tensors."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
    return key is not None and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key("nanwatch::abs_range", key)
    )


def implementations() -> list[tuple[str, torch.device, str]]:
    """Return (name, device, CPU capability to hold or "") of every implementation this machine can run."""
    found: list[tuple[str, torch.device, str]] = []
    for device in _devices():
        native = _has_kernel(device)
        if native and device.type == "cpu" and _extension.C is not None:
            levels = [str(level) for level in _extension.C.cpu_capabilities()]
            found += [(f"{device} native {level}", device, level) for level in levels]
        else:
            found.append((f"{device} {'native' if native else 'torch operations'}", device, ""))
    return found


def selfcheck() -> Iterator[Outcome]:
    """Compare each implementation with the reference on the CPU, dtype by dtype. One outcome for each pair."""
    for dtype in sorted(_reference.READABLE_DTYPES, key=str):
        for name, device, capability in implementations():
            yield _check(name, device, capability, dtype)


def _check(name: str, device: torch.device, capability: str, dtype: torch.dtype) -> Outcome:
    spelled = str(dtype).removeprefix("torch.")
    with warnings.catch_warnings(), _held_at(capability):
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        try:
            torch.empty(1, dtype=dtype, device=device)
        except (RuntimeError, TypeError) as error:  # a dtype that this device lacks
            return Outcome(name, spelled, 0, skipped=str(error).splitlines()[0])
        tensors = _tensors(dtype)
        for x in tensors:
            try:
                wrong = _difference(x[1:], x.to(device)[1:])  # not aligned
            except Exception as error:  # a crash is one more difference
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                return Outcome(name, spelled, len(tensors), error=wrong)
    return Outcome(name, spelled, len(tensors))


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


def _difference(x: Tensor, moved: Tensor) -> str:
    """Return the first difference between the implementation of `moved`'s device and the reference, or ""."""
    for name in ("abs_range", "health"):
        got, expected = getattr(_extension, name)(moved).cpu(), getattr(_reference, name)(x)
        expected = expected.to(got.dtype)  # a device without float64 gives float32 rows
        if not torch.equal(got.nan_to_num(nan=-7.0), expected.nan_to_num(nan=-7.0)):
            return f"{name} gives {got.tolist()}, the reference {expected.tolist()}"
    return ""


def _outcome_line(outcome: Outcome) -> str:
    verdict = f"equal on {outcome.cases} tensor{'' if outcome.cases == 1 else 's'}"
    if outcome.skipped or outcome.error:
        verdict = f"skipped: {outcome.skipped}" if outcome.skipped else f"WRONG: {outcome.error}"
    return f"{outcome.implementation:<24}{outcome.dtype:<16}{verdict}"


def parser(name: str, examples: str) -> argparse.ArgumentParser:
    """Return the parser of the doctor called by this name, or by none."""
    description = "What is installed, which implementation serves which device, and why a part is missing."
    made = command_parser(name, description, examples)
    made.add_argument(
        "--selfcheck", action="store_true", help="compare every implementation with the reference"
    )
    return made


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    options = parser("doctor", _EXAMPLES).parse_args(arguments)

    document = facts()
    if not options.json:
        print("\n".join(_lines(document)))
    if not options.selfcheck:
        if options.json:
            print(json.dumps(document, indent=2))
        return 0

    outcomes = []
    for outcome in selfcheck():
        outcomes.append(outcome)
        if not options.json:
            print(_outcome_line(outcome), flush=True)
    wrong = sum(1 for outcome in outcomes if outcome.error)
    if options.json:
        document["selfcheck"] = {"passed": wrong == 0, "outcomes": [asdict(outcome) for outcome in outcomes]}
        print(json.dumps(document, indent=2))
    else:
        print(
            f"self-check: {wrong} of {len(outcomes)} comparisons WRONG" if wrong else "self-check: all equal"
        )
    return 1 if wrong else 0
