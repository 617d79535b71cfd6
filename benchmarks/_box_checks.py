"""Checks of a black box against the account of the process that wrote it."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

import _box_program
import torch
from _box_account import DATA, FORWARD, GRADIENT, STEP, Account, Trial
from _box_faults import KINDS
from torch import Tensor

from nanwatch.blackbox.story import BlackBoxReport, read_black_box

MOST_LOST = 64
_FATAL = re.compile(r"^Fatal Python error: .*$", re.MULTILINE)
_WARNING = "nanwatch keeps no black box"


@dataclass(frozen=True)
class Ended:
    """How a process ended and what it wrote."""

    status: int | None
    output: str
    errors: str

    def __str__(self) -> str:
        if self.status is None:
            return "hangs"
        core = " with a core dump" if os.WIFSIGNALED(self.status) and os.WCOREDUMP(self.status) else ""
        return f"{os.waitstatus_to_exitcode(self.status)}{core}"


def _traceback(ended: Ended) -> str:
    """Return what a process wrote of its last exception, if any."""
    return "".join(ended.errors.rpartition("Traceback")[1:])[-1500:]


def differences(plain: Ended, watched: Ended, box: str) -> list[str]:
    """Return in what the watched process differs from the same without nanwatch."""
    faults = []
    if plain.status != watched.status:
        faults.append(f"ended by {watched} for {plain}: {watched.errors[-200:]!r}")
    if plain.output != watched.output:
        faults.append(f"wrote {watched.output!r} for {plain.output!r}")
    if _FATAL.findall(plain.errors) != _FATAL.findall(watched.errors):
        faults.append("faulthandler wrote otherwise")
    if ("Traceback" in watched.errors) != ("Traceback" in plain.errors):
        faults.append(f"raised {_traceback(watched)!r} for {_traceback(plain)!r}")
    if watched.errors.count(_WARNING) != (box == "none"):
        faults.append(f"warned {watched.errors.count(_WARNING)} times of no black box")
    return faults


def wrong(trial: Trial, account: Account, path: Path, pid: int) -> tuple[list[str], int]:
    """Return what the black box says wrongly, and how many calls it lost."""
    kind = KINDS[trial.fault]
    try:
        report = read_black_box(path)
    except (OSError, ValueError) as error:
        return ([] if kind.box == "any" else [f"does not open: {error}"]), 0
    if kind.box == "any":
        return [], 0
    lost = account.num_ended - report.num_calls
    # Each thread may have one call that has begun and not ended when the process ends.
    slack = trial.threads if trial.fault == "SIGKILL by the parent" or trial.threads > 1 else 0
    faults = []
    # An exception ends calls that did not end by themselves.
    if lost > MOST_LOST or (lost < -slack and kind.box == "named"):
        faults.append(f"has {report.num_calls} calls for {account.num_ended}")
    if report.pid != pid:
        faults.append(f"is of process {report.pid} for {pid}")
    if report.end not in kind.end.split():
        faults.append(f"ended by {report.end} for {kind.end}")
    if kind.box == "named":
        faults += _wrong_place(trial, account, report)
    elif kind.box == "noted" and trial.place in ("before", "after"):
        named = [str(note.get("module", "")) for note in report.notes if note["kind"] == "out of memory"]
        module = names()[trial.module] or "the root module"
        if named != [f"{module} (Spied)"]:
            faults.append(f"notes {named} for {module}")
    return faults, max(lost, 0)


def _wrong_place(trial: Trial, account: Account, report: BlackBoxReport) -> list[str]:
    is_exact = trial.fault != "SIGKILL by the parent"
    faults = []
    boxed = {
        thread.id: tuple(one.module for one in thread.calls if one.class_name == "Spied")
        for thread in report.threads
    }
    stacks = {
        thread: tuple(names()[number] for number in stack) for thread, stack in account.stacks().items()
    }
    main = next(iter(stacks)) if trial.threads == 1 else None
    for thread, stack in stacks.items():
        seen = boxed.get(thread, ())
        # The thread of the fault stands still. Others, and one that the parent kills, may have come one event further;
        # so may that of SIGTERM, which goes to the process: another thread may get it.
        is_at_fault = thread == account.fault_thread and trial.fault != "SIGTERM"
        is_still = is_exact and (trial.threads == 1 or is_at_fault)
        if seen != stack and (is_still or (seen[:-1] != stack and seen != stack[:-1])):
            faults.append(f"has {seen} under way for {stack}")
    if extra := boxed.keys() - stacks.keys() - ({*boxed} if trial.threads > 1 else set()):
        faults.append(f"has threads {extra}")
    if trial.threads > 1:
        # Any thread may get a signal that is sent to the process.
        if report.end == "signal" and trial.fault.startswith(("SIGSEGV", "abort")):
            module = report.under_way.module if report.under_way else None
            if module != names()[trial.module]:
                faults.append(f"names {module} for {names()[trial.module]}")
        return faults
    kind, batch, gradient = account.latest
    batches = {batch, *({None, batch - 1} if kind == DATA or not is_exact else ())}
    if not is_exact:
        batches.add(batch + 1)
    if report.batch not in batches:
        faults.append(f"says batch {report.batch} for {batch}")
    allowed = {FORWARD: ("",), GRADIENT: ("backward",), STEP: ("step",), DATA: ("step",)}[kind]
    if main is not None and stacks[main]:
        allowed = ("forward",)
    elif batch == 0 and kind == DATA:
        allowed = ("", "step")
    elif not is_exact:
        allowed = {
            FORWARD: ("", "forward", "backward"),
            GRADIENT: ("", "backward", "step"),
            STEP: ("backward", "step"),
            DATA: ("step", "forward", ""),
        }[kind]
    if not is_exact:
        allowed = (*allowed, "forward")
    if report.phase not in allowed:
        faults.append(f"says phase {report.phase!r} for {allowed}")
    if report.phase == "backward" and kind == GRADIENT and report.gradient is not None:
        known = (
            _gradients(gradient)
            if is_exact
            else {*_near(gradient - 1), *_near(gradient), *_near(gradient + 1)}
        )
        if report.gradient not in known:
            faults.append(f"names the gradient {report.gradient} for {known}")
    return faults


@functools.cache
def names() -> list[str]:
    """Return the names of the Spied modules, by number."""
    return list(_box_program.spied(_box_program.build()))


@functools.cache
def _tensors() -> tuple[dict[str, int], dict[int, set[tuple[str, str]]]]:
    """Return the tensor that each module returns, and by tensor the modules that have it as output or input."""
    model = _box_program.build()
    outputs: dict[str, int] = {}
    users: dict[int, set[tuple[str, str]]] = {}
    alive: list[Tensor] = []

    def saw(name: str, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        alive.extend((inputs[0], output))
        outputs[name] = id(output)
        users.setdefault(id(inputs[0]), set()).add((name, "input"))
        users.setdefault(id(output), set()).add((name, "output"))

    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda module, inputs, output, name=name: saw(name, inputs, output)  # type: ignore[misc]
        )
    model(torch.ones(4, 16))
    return outputs, users


def _gradients(module: int) -> set[tuple[str, str]]:
    """Return the names that the gradient of this module's output may have."""
    outputs, users = _tensors()
    return users[outputs[names()[module]]]


def _near(module: int) -> set[tuple[str, str]]:
    """Return the same, and the gradients that come just before and after: of what is inside the module."""
    if not 0 <= module < len(names()):
        return set()
    inner = f"{names()[module]}.inner".lstrip(".")
    inside = {(inner, part) for part in ("output", "input", "weight")}
    return {*_gradients(module), *inside, *(users for users in _users_of(inner))}


def _users_of(name: str) -> set[tuple[str, str]]:
    outputs, users = _tensors()
    return users.get(outputs.get(name, 0), set())
