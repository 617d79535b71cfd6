"""The warnings of `on_nonfinite="warn"`: once a batch for every module that is at fault, and how often it was again."""

from __future__ import annotations

import warnings

from . import text
from .finding import Finding


class FaultWarnings:
    """Counts the faulty calls of a batch by their modules; with `speaks` it warns of them."""

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._counts: dict[str, int] = {}

    def begin(self) -> None:
        """The first fault of a batch comes."""
        self._counts = {}

    def count(self, module: str) -> bool:
        """A call of the module was faulty; whether that is to be warned of."""
        self._counts[module] = self._counts.get(module, 0) + 1
        return self._speaks and self._counts[module] == 1

    @property
    def is_first(self) -> bool:
        """Whether one module alone was at fault so far."""
        return len(self._counts) == 1

    def warn(self, finding: Finding | None) -> None:
        """Warn of a module's first fault."""
        if finding is not None:
            message = f"{text.summary(finding)}; Watch.report() has the frames that led to the first"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def end(self, batch: int) -> None:
        """The batch is over: warn of modules that were at fault again."""
        repeats = {name: count - 1 for name, count in self._counts.copy().items() if count > 1}
        if self._speaks and repeats:
            listed = ", ".join(f"{name or 'the model'} {count} more" for name, count in repeats.items())
            warnings.warn(f"batch {batch}, further faulty calls: {listed}", RuntimeWarning, stacklevel=2)
        self._counts = {}
