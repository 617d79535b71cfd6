"""The modules that `import nanwatch` imports."""

from __future__ import annotations

import json
import subprocess
import sys

from support.processes import environment

NUMERICS = {f"nanwatch.numerics.{name}" for name in ("_extension", "_reference", "formats")}
MODULES = {"nanwatch", "nanwatch._C", "nanwatch._version", "nanwatch.numerics", *NUMERICS}


# Modules that are slow to import, or that only a part of nanwatch needs.
OTHERS = {
    *("transformers", "lightning", "pytorch_lightning", "accelerate", "tensorboard", "wandb", "safetensors"),
    *("rich", "pyarrow", "pandas", "polars", "jinja2", "pytest", "hypothesis", "pybind11"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"),
    "torch.utils.tensorboard",
}
SCRIPT = """
import json, pathlib, sys, torch
maps = pathlib.Path("/proc/self/maps")
driver = lambda: maps.exists() and "libcuda.so" in maps.read_text()
before, had_driver = set(sys.modules), driver()
import nanwatch
new = sorted(set(sys.modules) - before)
nanwatch.abs_range(torch.ones(3))
print(json.dumps([new, torch.cuda.is_initialized() or driver() > had_driver]))
"""


def test_importing_it_imports_little_before_its_first_use() -> None:
    """The operators and what they need. Every public name is imported when it is first asked for.

    No optional package comes with it, and reading a CPU tensor neither initialises CUDA nor loads the driver.
    """
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment(), capture_output=True, text=True, check=True
    )
    new, touched_cuda = json.loads(done.stdout)
    assert {name for name in new if name.split(".")[0] == "nanwatch"} <= MODULES
    assert [name for name in new for other in OTHERS if f"{name}.".startswith(f"{other}.")] == []
    assert not touched_cuda
