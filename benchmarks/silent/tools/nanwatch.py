"""nanwatch's audit of steps: `watch(model, audit=True)`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

import nanwatch
from silent.tools.protocol import Finding

# nanwatch imports most of itself when a watch begins. Here once, in the process that all trainings are forked from.
with nanwatch.watch(_model := torch.nn.Linear(1, 1), audit=True, black_box=False):
    _model(torch.ones(1, 1)).sum().backward()
    torch.optim.SGD(_model.parameters(), lr=0.1).step()


class Tool:
    live = True

    def __init__(self) -> None:
        self.watch = None

    @contextlib.contextmanager
    def watching(self, model, **intent) -> Iterator[None]:
        audit = nanwatch.Audit(frozen=[f"{name}.*" for name in intent.get("frozen", ())])
        with nanwatch.watch(model, audit=audit) as self.watch:
            yield

    def after_step(self, step: int, loss: float) -> None:
        pass

    def findings(self) -> list[Finding]:
        return [self.translated(finding) for finding in (self.watch.updates if self.watch else ())]

    def translated(self, finding) -> Finding:
        name = ".".join(part for part in (finding.module, finding.parameter) if part)
        place = re.search(r":(\d+)", str(finding.place or ""))
        return Finding(
            finding.step, finding.kind, name, int(place[1]) if place else None, str(finding.message)
        )
