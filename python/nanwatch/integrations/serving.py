"""Watch of a model that an inference engine serves: the requests of a batch whose rows were not finite."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..records.record import Record
from ..report.finding import Finding
from ..report.text import summary
from ..session.api import DeferredWatch
from ..util.visible import is_due, module_name, spell, suppressing, visible

Phase: TypeAlias = Literal["prefill", "decode"]

# Limits: requests that went bad, and steps whose rows are still on a device.
_MOST_REQUESTS, _MOST_STEPS = 1000, 4


class Share(NamedTuple):
    """Rows of one request in a batch: its `num_tokens` tokens from `position` on, and the KV blocks of the request."""

    request: str
    phase: Phase
    num_tokens: int
    position: int
    blocks: Sequence[int] = ()
    block_size: int = 0


class BadRequest(NamedTuple):
    """A request whose rows were not finite: its first such token and that token's KV block, None where unknown.

    `first` is what was first non-finite in that step of the engine. `module` is where.
    """

    request: str
    phase: Phase
    position: int
    block: int | None
    module: str
    first: str

    def __str__(self) -> str:
        block = "" if self.block is None else f", KV block {self.block}"
        return f"request {self.request} in {self.phase}, token {self.position}{block}"


@dataclass(eq=False)
class _Step:
    """A step of the engine, from its first batch on. `shares` and the largest magnitude of each row come at its end."""

    first: int
    ask: Callable[[], Sequence[Share]]
    shares: Sequence[Share] = ()
    peaks: Sequence[Tensor] = ()
    finding: Finding | None = None
    bad: dict[str, BadRequest] = field(default_factory=dict)


def owner_of(shares: Sequence[Share], row: int, num_rows: int) -> tuple[Share, int] | None:
    """Return the request of a row, and the position of the row's token; None for padding and without rows of tokens.

    A tensor has a row for each token of the batch, and perhaps some as padding, or one for each request.
    """
    if num_rows == len(shares):
        return shares[row], shares[row].position + shares[row].num_tokens - 1
    if num_rows < sum(share.num_tokens for share in shares):
        return None
    for share in shares:
        if row < share.num_tokens:
            return share, share.position + row
        row -= share.num_tokens
    return None


class ServedModel:
    """Watch of a served model, which names the requests that go bad. The engine's plugin calls it around each step.

    Serving goes on: `on_nonfinite` is "record", unless NANWATCH_OPTIONS says otherwise. Raises as
    `watch` does for options that make no sense.
    """

    def __init__(self, log: str) -> None:
        self._deferred = DeferredWatch({"on_nonfinite": "record"})
        self._log = logging.getLogger(log)
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._steps: deque[_Step] = deque(maxlen=_MOST_STEPS)
        self.requests: dict[str, BadRequest] = {}
        self._num_told = 0

    def start(self, model: nn.Module) -> None:
        """Watch `model`, unless it is watched already or could not be. An error is logged, and serving goes on."""
        if self._model() is model:
            return
        self._model = weakref.ref(model)
        try:
            self._deferred.start(model)
            self._deferred.describe(self._describe)
        except Exception as error:
            self._log.error("nanwatch watches nothing: %s", visible(spell(error)))

    def stop(self) -> None:
        """Leave the model as it was found."""
        self._deferred.stop()

    def step_begins(self, shares: Callable[[], Sequence[Share]]) -> None:
        """Take what tells the requests of the step, in the order of their rows. It is asked while the model runs."""
        latest = None if self._deferred.watch is None else self._deferred.watch.batch
        self._steps.append(_Step(0 if latest is None else latest + 1, shares))

    def step_ended(self, *outputs: object) -> None:
        """Look for bad rows in the outputs of the step, if one of its batches was not finite."""
        rows = [x for x in outputs if isinstance(x, Tensor) and x.dim() > 1 and x.numel()]
        step = self._steps.pop()
        if any(x.device.type != "cpu" for x in rows) or step.finding is not None:
            step.shares = step.ask()
            step.peaks = [torch.linalg.vector_norm(x.detach().flatten(1), float("inf"), dim=1) for x in rows]
            self._steps.append(step)
        for step in [*self._steps]:
            if step.finding is not None:
                self._steps.remove(step)
                self._tell(step, step.finding)

    def _describe(self, finding: Finding, record: Record | None) -> tuple[str, ...]:
        """Return a remark on whose row the first non-finite element is in."""
        step = next((step for step in reversed(self._steps) if step.first <= finding.batch), None)
        if step is None:
            return ()
        step.finding = step.finding or finding
        with suppressing("the request of a finding could not be told"):
            if finding.index and record is not None and record.role in ("input", "output") and record.shape:
                owner = owner_of(step.shares or step.ask(), finding.index[0], record.shape[0])
                if owner is not None:
                    bad = step.bad.setdefault(owner[0].request, _bad(*owner, step.finding))
                    return (f"in a row of {bad}",)
        return ()

    def _tell(self, step: _Step, finding: Finding) -> None:
        """Log and count the bad requests of a step that were not bad before. Waits for a device."""
        for peaks in step.peaks:
            for row in (~torch.isfinite(peaks)).nonzero().flatten().tolist():
                owner = owner_of(step.shares, row, len(peaks))
                if owner is not None and owner[0].request not in step.bad:
                    step.bad[owner[0].request] = _bad(*owner, finding)
        for request, bad in step.bad.items():
            if request not in self.requests:
                self.requests[request] = bad
                if len(self.requests) > _MOST_REQUESTS:
                    del self.requests[next(iter(self.requests))]
                if (counter := _counter()) is not None:
                    counter.labels(phase=bad.phase).inc()
                self._say(f"{bad} was not finite: {bad.first}")
        if not step.bad:
            self._say(f"{summary(finding)}; the rows of all requests were finite at the end")

    def _say(self, message: str) -> None:
        self._num_told += 1
        if is_due(self._num_told):
            self._log.warning("nanwatch: %s", visible(message))

    def answer(self) -> dict[str, Any]:
        """Return the requests that went bad, and the report as JSON, in types that every channel carries."""
        watch = self._deferred.watch
        report = None if watch is None else watch.report().to_json()
        return {"requests": [bad._asdict() for bad in self.requests.values()], "report": report}


def _bad(share: Share, position: int, finding: Finding) -> BadRequest:
    place = position // share.block_size if share.block_size else len(share.blocks)
    block = share.blocks[place] if place < len(share.blocks) else None
    module, first = module_name(finding.module), summary(finding)
    return BadRequest(share.request, share.phase, position, block, module, first)


@cache
def _counter() -> Any:
    """Return a Prometheus counter, None without the package; vLLM and SGLang bring it."""
    try:
        from prometheus_client import Counter
    except ImportError:
        return None
    return Counter("nanwatch_bad_requests", "Requests with a row that was not finite", ["phase"])
