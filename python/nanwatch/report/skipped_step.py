"""SkippedStep: a step of the optimizer that a GradScaler has skipped."""

from __future__ import annotations

from dataclasses import dataclass

from ..records.note import Note
from .finding import Finding


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """Step that was skipped because gradients of `batch` were not finite.

    `scale_before` and `scale_after` are the GradScaler's, None where none was found.
    """

    batch: int
    scale_before: float | None
    scale_after: float | None
    finding: Finding

    def __str__(self) -> str:
        return str(self.note)

    @property
    def note(self) -> Note:
        """Return the note of the gradients that the step did not take."""
        before, after = self.scale_before, self.scale_after
        if before is None:
            return Note("skipped_step")
        fell = "" if after is None or after == before else f" → {_spell(after)}"
        return Note("skipped_step", f"scale {_spell(before)}{fell}")


def _spell(scale: float) -> str:
    return f"{scale:.0f}" if scale.is_integer() and scale < 1e15 else f"{scale:g}"
