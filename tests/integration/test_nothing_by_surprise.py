"""Inventory of a process before, during and after a plain watch: what it adds, and what is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.processes import environment, forked

# Prints what differs from the process before nanwatch was imported: after the import, during the watch, and after it.
SCRIPT = """
import json, os, signal, sys, threading, types
import torch, torch.distributed, torch.utils.checkpoint, torch.distributed.pipelining
import torch._subclasses.schema_check_mode  # by torch, where modes are set aside for a read
from torch import nn

def inventory():
    found = {"threads": len(os.listdir("/proc/self/task"))}
    found |= {f"signal {number}": str(signal.getsignal(number)) for number in signal.valid_signals()}
    masks = [line for line in open("/proc/self/status") if line[:6] in ("SigCgt", "SigIgn", "SigBlk")]
    found |= {line[:6]: line for line in masks}
    for name in ("excepthook", "unraisablehook", "displayhook", "meta_path", "path_hooks"):
        found[f"sys.{name}"] = str(getattr(sys, name))
    found["sys.trace"] = str((sys.gettrace(), sys.getprofile(), threading.gettrace()))
    found["threading.excepthook"] = str(threading.excepthook)
    walked = os.walk(os.environ["HOME"])
    found["files"] = sorted(os.path.join(folder, name) for folder, _, names in walked for name in names)
    opened = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    found["open"] = sorted(os.readlink(path) for path in opened if os.path.exists(path))
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "torch" and isinstance(module, types.ModuleType):
            for owner, owner_name in [(module, name)] + [
                (value, f"{name}.{key}") for key, value in vars(module).items()
                if isinstance(value, type) and value.__module__ == name
            ]:
                for key, value in [*vars(owner).items()]:
                    size = len(value) if isinstance(value, (dict, list, set)) else 0
                    found[f"{owner_name}.{key}"] = (id(value), size)
    return found

def changed(before):
    now = inventory()
    return sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key))

def train():
    for _ in range(2):
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
optimizer = torch.optim.Adam(model.parameters())
train()
before, stages = inventory(), []
import nanwatch
nanwatch.watch, nanwatch.NonFiniteError
stages.append(changed(before))
imported = inventory()
watch = nanwatch.watch(model, **eval(sys.argv[1]))
train()
stages.append(changed(imported))
watch.stop()
stages.append(changed(imported))
train()
print(json.dumps(stages))
"""

# The operators torch.ops.nanwatch are registered by the import.
REGISTERED = {
    *("torch.jit._builtins._builtin_table", "torch.library._defs", "torch.library._impls"),
    *("torch.ops._dir", "torch.ops.nanwatch", "torch.ops._OpNamespace._dir"),
}
# A counter of handles that were ever made.
COUNTERS = {"torch.utils.hooks.RemovableHandle.next_id"}


def stages(folder: Path, options: dict[str, Any]) -> list[set[str]]:
    clean = environment(HOME=str(folder), XDG_STATE_HOME=str(folder), PYTHONDONTWRITEBYTECODE="1")
    done = forked("-W", "ignore", "-c", SCRIPT, repr(options), cwd=folder, env=clean)
    assert done.returncode == 0, done.stderr
    return [set(stage) for stage in json.loads(done.stdout)]


@pytest.mark.parametrize("options", [{}, {"gradients": True, "on_nonfinite": "warn", "audit": 1}], ids=str)
def test_a_watch_leaves_nothing_behind(options: dict[str, Any], tmp_path: Path) -> None:
    """It changes nn.Module, Dynamo and PyTorch's lists of hooks while it lasts. Files, threads and handlers stay."""
    imported, during, after = stages(tmp_path, options)
    assert imported <= REGISTERED | {"open"}
    assert "torch.nn.modules.module.Module._compiled_call_impl" in during
    assert {name for name in during if not name.startswith("torch.")} <= {"sys.meta_path"}
    assert after <= COUNTERS


@pytest.mark.native  # writes the box
def test_a_black_box_comes_with_an_output_dir(tmp_path: Path) -> None:
    """The inventory sees its file, its thread and its handlers."""
    during = stages(tmp_path, {"output_dir": str(tmp_path / "out")})[1]
    assert {"files", "threads", "SigCgt"} <= during
