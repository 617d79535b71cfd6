"""Protocols of an adapter. One file a tool in this folder; `run.py --tool NAME` takes the class Tool of `NAME.py`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from silent.case import Case


@dataclass(frozen=True)
class Finding:
    """Statement of a tool about a training. None stands for a fact that it does not state.

    Attributes:
        step: the optimizer step, from 1, after which the tool says it.
        kind: the cause, by the slugs of `cases.json`.
        module: the module or parameter to blame, by its name in the model.
        line: the line to blame in the training's script.
        text: in the tool's words.
    """

    step: int | None = None
    kind: str | None = None
    module: str | None = None
    line: int | None = None
    text: str = ""


class InProcess(Protocol):
    """A tool that is a context manager. A new one is made for each training, in the training's process.

    With an attribute `live = True`, `findings` is asked after each step too, and the runner notes the step at which
    each finding was there. The order of findings must then stay as it was.
    """

    def watching(self, model: nn.Module, **intent: Any) -> AbstractContextManager[Any]:
        """Return the context manager to train in. Intent is what the user means: `frozen`, `tied` (names)."""

    def after_step(self, step: int, loss: float) -> None:
        """Take the loss of an optimizer step that is over."""

    def findings(self) -> list[Finding]:
        """Return what the tool found, once the script has ended."""


class Command(Protocol):
    """A tool that is a command: it runs the script itself. One serves all trainings."""

    def judge(self, case: Case, form: str, folder: Path) -> tuple[list[Finding], float]:
        """Run a form of a training under the tool, with a folder for its files; return findings and seconds."""
