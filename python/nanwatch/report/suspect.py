"""Weights that a report suspects: one that grew, or one that is far from its siblings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ..util.visible import module_name


@dataclass(frozen=True, slots=True)
class Suspect:
    """A weight whose abs max is much larger than it was, or than that of its siblings.

    `first` is its abs max when the watch began, None where it has not grown much. `siblings` is the pattern of the
    names of the modules that hold the same weight in the other layers, "" where it is not far from theirs. There are
    `num_siblings` of them, whose abs max has the median `median`.
    """

    module: str
    label: str
    abs_max: float
    first: float | None = None
    siblings: str = ""
    num_siblings: int = 0
    median: float | None = None

    def grown_from(self, first: float) -> Suspect:
        """Return the suspect with the abs max that it had."""
        return replace(self, first=first)

    def apart_from(self, pattern: str, siblings: Sequence[float]) -> Suspect:
        """Return the suspect with its siblings, by their abs max."""
        return replace(self, siblings=pattern, num_siblings=len(siblings), median=median(siblings))

    @property
    def growth(self) -> str:
        """The weight with its first and latest abs max, "" where it has not grown much."""
        if self.first is None:
            return ""
        return f"`{self.label}` of {module_name(self.module)} from {self.first:.3g} to {self.abs_max:.3g}"

    def lines(self) -> Iterator[str]:
        """Yield the lines of a report."""
        if self.growth:
            yield (
                f"Grew:  abs max of {self.growth} since the watch began: look at the learning rate, at weight decay and"
                " at the clipping of gradients."
            )
        if self.siblings and self.median is not None:
            yield (
                f"Apart: abs max of `{self.label}` of {module_name(self.module)} is {self.abs_max:.3g}, the median of"
                f" the {self.num_siblings} other {self.siblings} is {self.median:.3g}."
            )
