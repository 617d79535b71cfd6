"""Runs one form of a training in a forked process, or in one a rank, and brings back what came of it."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import runpy
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what a first optimizer, DDP and DataLoader import: seconds that each process would spend
import torch.nn.parallel
import torch.utils.data

from silent.case import Case
from silent.tools.protocol import Finding

LIMIT = 60.0  # seconds for a training


@dataclass
class Run:
    """Result of one rank: its losses and facts, the tool's findings, the time inside `watch`."""

    losses: list[float] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    snapshots: Any = None
    error: str = ""


def run(case: Case, form: str, tool: str) -> list[Run]:
    """Run a form of a case under the tool of that name, and return a Run for each rank.

    The processes are forked, so that they need not import torch. The caller must not have trained before.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        context = multiprocessing.get_context("fork")
        arguments = [(case, form, tool, rank, port, Path(folder)) for rank in range(case.ranks)]
        processes = [context.Process(target=_child, args=each) for each in arguments]
        for process in processes:
            process.start()
        end = time.monotonic() + LIMIT
        for process in processes:
            process.join(max(0.1, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        results = []
        for rank, process in enumerate(processes):
            path = Path(folder) / f"{rank}.pickle"
            if path.exists():
                results.append(pickle.loads(path.read_bytes()))
            else:
                results.append(Run(error=f"rank {rank} ended with status {process.exitcode}"))
        return results


def _child(case: Case, form: str, tool_name: str, rank: int, port: int, folder: Path) -> None:
    """Run the script as `python script.py` would, under the tool, and write the Run."""
    os.environ.update(
        SILENT_FORM=form, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    os.chdir(folder)
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    result = Run()
    try:
        kit = importlib.import_module("silent.kit")
        tool = importlib.import_module(f"silent.tools.{tool_name}").Tool()
        kit.tool = tool.watching
        appeared: list[
            int
        ] = []  # the script's step at which each finding was there; tools count in their own ways

        def after_step(step: int, loss: float) -> None:
            tool.after_step(step, loss)
            if getattr(tool, "live", False):
                appeared.extend([step] * (len(tool.findings()) - len(appeared)))

        kit.after_step = after_step
        sys.argv = [str(case.script)]
        try:
            runpy.run_path(str(case.script), run_name="__main__")
        except BaseException:
            result.error = traceback.format_exc()
        result.losses, result.facts, result.seconds = kit.losses, kit.facts, kit.seconds
        found = tool.findings()
        if getattr(tool, "live", False):
            appeared.extend([len(kit.losses)] * (len(found) - len(appeared)))
            found = [replace(finding, step=step) for finding, step in zip(found, appeared, strict=False)]
        result.findings = found
        result.snapshots = getattr(tool, "snapshots", None)
    except BaseException:
        result.error += traceback.format_exc()
    sys.stdout.flush()
    (folder / f"{rank}.tmp").write_bytes(pickle.dumps(result))
    (folder / f"{rank}.tmp").rename(folder / f"{rank}.pickle")
    os._exit(0)
