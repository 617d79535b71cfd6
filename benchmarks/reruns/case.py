"""What a program of the judge uses: the mark of a case, the watch of either run, and notes of its state.

A case is a function below `@case(...)`. It trains, goes on after a non-finite batch, and returns its state as a dict
that JSON takes. Two marks stand on lines of its source, after the case before it: `# FAULT` where the value is made,
`# ONCE` where something happens that nobody can take back. With a pattern of names behind it, `# FAULT hook_*`, a mark
is that of all these cases.

Unwatched, `watch` stands for the check that a user writes: an output or a gradient that is not finite raises, before
the step. So both runs skip the same steps.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import nanwatch


@dataclass(frozen=True)
class Case:
    """A program and what its report should say.

    `operation` is a pattern in the operation's name, "" where none is expected. `cure`: a patch that works applies.
    With `once` a remark that names a line with `# ONCE` may stand in for operation, line and cure; with
    once="in-process" only where no child can be had. Without `finding` none is expected, as where a signal ends the
    process at once. The marks are those of the `script`, if there is one.
    """

    function: Callable[[], dict[str, Any] | None]
    operation: str
    cure: bool
    once: bool | str
    finding: bool
    script: str

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def file(self) -> Path:
        """Return the file that has the marks."""
        module = Path(self.function.__code__.co_filename)
        return module.parent / self.script if self.script else module


CASES: dict[str, Case] = {}


def case(
    operation: str = "",
    *,
    cure: bool = False,
    once: bool | str = False,
    finding: bool = True,
    script: str = "",
) -> Callable[[Callable[[], dict[str, Any] | None]], Callable[[], dict[str, Any] | None]]:
    """Add the function to the judge's cases."""

    def add(function: Callable[[], dict[str, Any] | None]) -> Callable[[], dict[str, Any] | None]:
        CASES[function.__name__] = Case(function, operation, cure, once, finding, script)
        return function

    return add


class PlainNonFiniteError(ArithmeticError):
    """What the user's own check raises."""


NonFinite = (PlainNonFiniteError, nanwatch.NonFiniteError)


class _Run:
    """The present run: whether it is watched, what it noted, and the file that has it all."""

    watched = False
    notes: dict[str, Any] = {}  # noqa: RUF012
    findings: list[dict[str, Any]] = []  # noqa: RUF012
    told = 0
    bad = 0  # what the user's own check has found
    file = Path()


def watch(model: nn.Module, **options: Any) -> Any:
    """Watch the model, or check it as a user without nanwatch does."""
    if _Run.watched:
        return nanwatch.watch(model, **options)
    for module in model.modules():
        module.register_forward_hook(
            lambda module, args, output: _check("forward", [*_tensors(args), *_tensors(output)])
        )
    if options.get("gradients"):
        register_optimizer_step_pre_hook(_check_step)
    return None


def _check(what: str, tensors: Iterable[Tensor]) -> None:
    if not all(torch.isfinite(x).all() for x in tensors):
        _Run.bad += 1
        _write("")
        raise PlainNonFiniteError(what)


def _check_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def check() -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        _check("gradient", [p.grad for p in parameters if p.grad is not None])

    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        check()
        return None

    def checked() -> Any:
        loss = closure()
        check()
        return loss

    return args[:1], {"closure": checked}


def _tensors(value: Any) -> list[Tensor]:
    values = (
        value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else [value]
    )
    return [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]


def tell(error: BaseException) -> None:
    """Keep what the error reports, as a user writes it to a log."""
    _Run.told += 1
    if isinstance(error, nanwatch.NonFiniteError):
        _Run.findings.append(as_facts(error.report))


def as_facts(report: nanwatch.Report) -> dict[str, Any]:
    """Return of a report what the judge compares."""
    finding = report.finding
    if finding is None:
        return {}
    cures = [{"what": one.what, "works": one.works, "patch": one.patch} for one in finding.cures]
    names = "operation", "source", "remarks", "module", "label", "value", "batch"
    return {**{name: getattr(finding, name) for name in names}, "cures": cures, "text": report.to_text()}


def note(**facts: Any) -> None:
    """Add to the state of the run. They are in the file at once, as a signal may end the process."""
    _Run.notes.update(facts)
    _write("")


def ends(
    model: nn.Module | None = None, *generators: torch.Generator | random.Random | np.random.Generator
) -> dict[str, Any]:
    """Return what every program ends with: its weights and buffers, and the next draws of all random states."""
    draws: list[float] = [torch.rand(()).item(), random.random(), float(np.random.rand())]
    for one in generators:
        draw = (
            torch.rand((), generator=one).item() if isinstance(one, torch.Generator) else float(one.random())
        )
        draws.append(draw)
    state = {} if model is None else {name: x.tolist() for name, x in model.state_dict().items()}
    return {"draws": draws, "weights": state}


def run_case(one: Case, *, watched: bool, file: Path) -> None:
    """Run the case in this process and write to `file` its state, how it ended and what it told."""
    _Run.watched, _Run.file = watched, file
    _Run.notes, _Run.findings, _Run.told, _Run.bad = {}, [], 0, 0
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    ended = "returned"
    try:
        _Run.notes.update(one.function() or {})
    except nanwatch.NonFiniteError as error:
        tell(error)
        ended = "NonFinite"
    except PlainNonFiniteError as error:
        tell(error)
        ended = "NonFinite"
    except SystemExit as error:
        ended = f"SystemExit({error.code})"
    except BaseException as error:
        traceback.print_exc()
        ended = f"{type(error).__name__}: {error}"
    _write(ended)


def _write(ended: str) -> None:
    document = {
        "ended": ended,
        "told": _Run.told,
        "bad": _Run.bad,
        "state": _Run.notes,
        "process": _process_state() if ended else {},
        "findings": _Run.findings,
    }
    partial = _Run.file.with_suffix(".partial")
    partial.write_text(json.dumps(document), encoding="utf-8")
    os.replace(partial, _Run.file)


def _threads() -> list[str]:
    """Return the names of the threads that run, less the one that a watch keeps for its black box."""
    return sorted(one.name for one in threading.enumerate() if one.name != "nanwatch-black-box")


def _process_state() -> dict[str, Any]:
    """Return what a re-run could leave in the process: children, threads, handlers, timers, filters, files."""
    gc.collect()
    until = time.monotonic() + 2  # for the threads of a loader whose iterator was just dropped
    while len(threads := _threads()) > 1 and time.monotonic() < until:
        time.sleep(0.02)
    signals = signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGPIPE
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return {
        "handlers": [getattr(x, "__name__", str(x)) for x in map(signal.getsignal, signals)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "timer": signal.getitimer(signal.ITIMER_REAL)[1],
        "threads": threads,
        "children": len(children.read_text().split()) if children.exists() else 0,
        "filters": [str(x) for x in warnings.filters],
        "files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "threads_of_torch": torch.get_num_threads(),
        "modes": [
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
        ],
    }
