"""Suspect: a weight that grew much, or is far from its siblings, and its lines in a report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..util.visible import module_name
from .text import Fact


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

    @property
    def growth(self) -> str:
        """The weight with its first and latest abs max, "" where it has not grown much."""
        if self.first is None:
            return ""
        return f"`{self.label}` of {module_name(self.module)} from {self.first:.3g} to {self.abs_max:.3g}"

    def facts(self) -> Iterator[Fact]:
        """Yield the lines of a report."""
        if self.growth:
            yield Fact(
                "Grew",
                f"abs max of {self.growth} since the watch began: look at the learning rate, at weight decay and at the"
                " clipping of gradients.",
            )
        if self.siblings and self.median is not None:
            yield Fact(
                "Apart",
                f"abs max of `{self.label}` of {module_name(self.module)} is {self.abs_max:.3g}, the median of the"
                f" {self.num_siblings} other {self.siblings} is {self.median:.3g}.",
            )
