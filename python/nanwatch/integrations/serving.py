"""Watch of a model that an inference engine serves: the requests of a batch whose rows were not finite."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..numerics import _extension
from ..records.record import Record
from ..report.finding import Finding
from ..report.text import summary
from ..session.api import DeferredWatch, Watch
from ..session.option_sources import DEFAULT, in_force
from ..util.throttle import is_due
from ..util.visible import module_name, spell, suppressing, visible

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

    `first` is what was first non-finite in that batch of the model. `module` is where.
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


@dataclass
class _Step:
    """A step of the engine: the numbers of its batches, its shares, and the largest magnitude of each row."""

    batches: range
    shares: Sequence[Share]
    peaks: list[Tensor] = field(default_factory=list)

    def bad(self) -> Iterator[tuple[Share, int]]:
        """Yield each request with a bad row, and the position of the first. Waits for a device."""
        seen = set()
        for peaks in self.peaks:
            for row in (~torch.isfinite(peaks)).nonzero().flatten().tolist():
                owner = owner_of(self.shares, row, len(peaks))
                if owner is not None and owner[0].request not in seen:
                    seen.add(owner[0].request)
                    yield owner


def owner_of(shares: Sequence[Share], row: int, num_rows: int) -> tuple[Share, int] | None:
    """Return the request of a row, and the position of the row's token; None for padding and for other tensors.

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

    Serving goes on: `on_nonfinite` is "record", and on a GPU nothing waits (check="async"), unless the environment or a
    file with options says otherwise. Raises as `watch` does for options that make no sense.
    """

    def __init__(self, log: str) -> None:
        defaults = {"on_nonfinite": "record", "check": "auto" if _extension.C is None else "async"}
        said = in_force({})
        self._deferred = DeferredWatch({k: v for k, v in defaults.items() if said[k].source == DEFAULT})
        self._log = logging.getLogger(log)
        self._shares: Callable[[], Sequence[Share]] = tuple
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._first = 0
        self._steps: deque[_Step] = deque(maxlen=_MOST_STEPS)
        # By batch, each with the request of its row, where that is known.
        self._findings: dict[int, tuple[Finding, BadRequest | None]] = {}
        self.requests: dict[str, BadRequest] = {}
        self._num_told = 0

    @property
    def watch(self) -> Watch | None:
        """The Watch of the model; None before it is loaded."""
        return self._deferred.watch

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
        self._shares, self._first = shares, self._next_batch()

    def step_ended(self, *outputs: object) -> None:
        """Look for bad rows in the outputs of the step, if one of its batches was not finite."""
        rows = [x.detach().flatten(1) for x in outputs if isinstance(x, Tensor) and x.dim() > 1 and x.numel()]
        step = _Step(range(self._first, self._next_batch()), ())
        is_late = any(x.device.type != "cpu" for x in rows)
        if is_late or self._is_bad(step):
            step.shares = self._shares()
            step.peaks = [torch.linalg.vector_norm(x, float("inf"), dim=1) for x in rows]
            self._steps.append(step)
        self._shares = tuple
        for known in [step for step in self._steps if self._is_bad(step)]:
            self._steps.remove(known)
            self._tell(known)

    def _next_batch(self) -> int:
        return 0 if self.watch is None or self.watch.batch is None else self.watch.batch + 1

    def _is_bad(self, step: _Step) -> bool:
        return any(map(self._deferred.is_nonfinite, step.batches))

    def _describe(self, finding: Finding, record: Record | None) -> tuple[str, ...]:
        """Return a remark on whose row the first non-finite element is in."""
        bad = None
        with suppressing("the request of a finding could not be told"):
            if finding.index and record is not None and record.role in ("input", "output") and record.shape:
                owner = owner_of(self._shares(), finding.index[0], record.shape[0])
                bad = None if owner is None else _bad(*owner, finding)
        self._findings[finding.batch] = finding, bad
        _keep(self._findings, 2 * _MOST_STEPS)
        return () if bad is None else (f"in a row of {bad}",)

    def _tell(self, step: _Step) -> None:
        known = [self._findings[batch] for batch in step.batches if batch in self._findings]
        if not known:
            return
        finding, first = known[0]
        bad = {} if first is None else {first.request: first}
        for share, position in step.bad():
            bad.setdefault(share.request, _bad(share, position, finding))
        for request, one in bad.items():
            if request not in self.requests:
                self.requests[request] = one
                _keep(self.requests, _MOST_REQUESTS)
                if (counter := _counter()) is not None:
                    counter.labels(phase=one.phase).inc()
                self._say(f"{one} was not finite: {one.first}")
        if not bad:
            self._say(f"{summary(finding)}; the rows of all requests were finite at the end")

    def _say(self, message: str) -> None:
        self._num_told += 1
        if is_due(self._num_told):
            self._log.warning("nanwatch: %s", visible(message))

    def answer(self) -> dict[str, Any]:
        """Return the requests that went bad, and the report as JSON, in types that every channel carries."""
        report = None if self.watch is None else self.watch.report().to_json()
        return {"requests": [one._asdict() for one in self.requests.values()], "report": report}


def _keep(by_age: dict[Any, Any], most: int) -> None:
    while len(by_age) > most:
        del by_age[next(iter(by_age))]


def _bad(share: Share, position: int, finding: Finding) -> BadRequest:
    place = position // share.block_size if share.block_size else len(share.blocks)
    block = share.blocks[place] if place < len(share.blocks) else None
    return BadRequest(
        share.request, share.phase, position, block, module_name(finding.module), summary(finding)
    )


@cache
def _counter() -> Any:
    """Return a Prometheus counter, None without the package; vLLM and SGLang bring it."""
    try:
        from prometheus_client import Counter
    except ImportError:
        return None
    return Counter("nanwatch_bad_requests", "Requests with a row that was not finite", ["phase"])
