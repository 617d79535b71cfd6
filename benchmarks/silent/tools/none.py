"""No tool: the time that the others are compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from silent.tools.protocol import Finding


class Tool:
    @contextlib.contextmanager
    def watching(self, model, **intent) -> Iterator[None]:
        yield

    def after_step(self, step: int, loss: float) -> None:
        pass

    def findings(self) -> list[Finding]:
        return []
