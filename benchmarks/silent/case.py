"""The cases: what `cases.json` says of each training, and where its script and its line to blame are."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MARK = "# <- here"
FORMS = ("faulty", "mended", "twin")


@dataclass(frozen=True)
class Case:
    """One training, and what is wrong with its faulty form.

    Attributes:
        name: of its script in `trainings/`.
        source: the public report that it is rebuilt from.
        wrong: one sentence.
        kind: the slug of the cause that a tool should give.
        also: other slugs that name the same cause as well.
        modules: what is to blame, by names of `model.named_modules()`; a finding about a part of one is right too.
            The empty name is the whole model.
        step: the first optimizer step, from 1, after which the fault can be seen.
        ranks: how many processes train.
        effect: what the oracle checks (see `effects.py`).
        same: whether the mended form ends with the twin's weights.
    """

    name: str
    source: str
    wrong: str
    kind: str
    modules: tuple[str, ...]
    step: int
    effect: dict[str, Any]
    also: tuple[str, ...] = ()
    ranks: int = 1
    same: bool = True
    tags: tuple[str, ...] = field(default=())

    @property
    def script(self) -> Path:
        """Return the path of the training's script."""
        return HERE / "trainings" / f"{self.name}.py"

    @property
    def line(self) -> int:
        """Return the number of the line to blame, which carries MARK."""
        lines = self.script.read_text().splitlines()
        (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(MARK))
        return number


def load() -> tuple[Case, ...]:
    """Return all cases, in the order of `cases.json`."""
    tuples = ("modules", "also", "tags")
    return tuple(
        Case(**{key: tuple(value) if key in tuples else value for key, value in entry.items()})
        for entry in json.loads((HERE / "cases.json").read_text())
    )
