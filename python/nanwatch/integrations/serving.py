"""Watch of a model that vLLM or SGLang serves: the requests of a batch whose rows were not finite.

Each engine starts its plugin, `start_in_vllm` or `start_in_sglang`, in every process, without code of a user. vLLM
calls the `forward` of the decoder inside a model, a class under `support_torch_compile`, past `nn.Module.__call__`, and
SGLang that of the root. nanwatch does not see these calls, but those of the layers inside.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, partialmethod
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..records.record import Record
from ..report.finding import Finding
from ..report.text import summary
from ..session.api import DeferredWatch
from ..util.messages import is_due, module_name, spell, suppressing, visible
from ..util.program import when_imported

Phase: TypeAlias = Literal["prefill", "decode"]

# Limits: requests that went bad, and steps whose rows are still on a device.
_MOST_REQUESTS, _MOST_STEPS = 1000, 4
# The workers of GPUs, CPUs and XPUs are this class or inherit from it.
_VLLM_MODULE, _VLLM_WORKER = "vllm.v1.worker.gpu_worker", "Worker"
# The requests with which a worker of vLLM warms up are called _warmup_… and _v2_mixed_warmup….
_WARM_UP = "_"
_SGLANG_FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"


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

    log = "sglang.nanwatch"

    def __init__(self) -> None:
        self._deferred = DeferredWatch({"on_nonfinite": "record"})
        self._log = logging.getLogger(self.log)
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._steps: deque[_Step] = deque(maxlen=_MOST_STEPS)
        self.requests: dict[str, BadRequest] = {}
        self._num_messages = 0

    @classmethod
    def of(cls, host: Any) -> Any:
        """Return the watched model of a worker or runner, made the first time."""
        return vars(host).get("_nanwatch") or vars(host).setdefault("_nanwatch", cls())

    def start(self, model: nn.Module) -> None:
        """Watch `model`, unless it is watched already or could not be. An error is logged, and serving goes on."""
        if self._model() is model:
            return
        self._model = weakref.ref(model)
        try:
            self._deferred.start(model, describe=self._describe)
        except Exception as error:
            self._log.error("nanwatch watches nothing: %s", visible(spell(error)))

    def stop(self) -> None:
        """Leave the model as it was found."""
        self._deferred.stop()

    def step_begins(self, shares: Callable[[], Sequence[Share]]) -> None:
        """Take a function that tells the requests of the step by their rows. It is called while the model runs."""
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
        self._num_messages += 1
        if is_due(self._num_messages):
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


class VllmModel(ServedModel):
    """The watched model of one worker, with the KV blocks of its requests, of which each step tells the new ones."""

    log = "vllm.nanwatch"

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[str, list[int]] = {}

    def follow(self, scheduled: Any) -> None:
        """Take the blocks of a step: those of new and resumed requests whole, of others what is added."""
        for request in scheduled.finished_req_ids:
            self._blocks.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            self._blocks[new.req_id] = _only(new.block_ids)
        cached = scheduled.scheduled_cached_reqs
        for request, blocks in zip(cached.req_ids, cached.new_block_ids, strict=False):
            if request in cached.resumed_req_ids:
                self._blocks[request] = _only(blocks)
            elif blocks is not None:
                self._blocks.setdefault(request, []).extend(_only(blocks))

    def shares(self, worker: Any, scheduled: Any) -> list[Share]:
        """Return the shares of a step in the order in which the runner has put the requests."""
        runner = worker.model_runner
        batch = getattr(runner.execute_model_state, "input_batch", None) or runner.input_batch
        cached = scheduled.scheduled_cached_reqs
        progress = {new.req_id: (new.num_computed_tokens, 0) for new in scheduled.scheduled_new_reqs}
        numbers = zip(cached.num_computed_tokens, cached.num_output_tokens, strict=False)
        progress |= zip(cached.req_ids, numbers, strict=False)
        size = worker.vllm_config.cache_config.block_size
        shares = []
        for request in batch.req_ids:
            if (num_tokens := scheduled.num_scheduled_tokens.get(request)) is not None:
                position, num_outputs = progress[request]
                phase: Phase = "decode" if num_outputs else "prefill"
                blocks = self._blocks.get(request, ())
                shares.append(Share(request, phase, num_tokens, position, blocks, size))
        return shares


def _only(groups: tuple[list[int], ...]) -> list[int]:
    """Return the blocks of the only group of a request; none for a hybrid model, whose layers have different ones."""
    return list(groups[0]) if len(groups) == 1 else []


def start_in_vllm() -> None:
    """Watch the model of each worker of this process from its first request on.

    Raises TypeError or ValueError for options of the environment that make no sense, before a model is loaded.
    """
    VllmModel()
    when_imported(_VLLM_MODULE, _patch_vllm)  # to import it here would choose the platform too early


def _patch_vllm() -> None:
    worker = getattr(sys.modules[_VLLM_MODULE], _VLLM_WORKER)
    if not hasattr(worker, "nanwatch_report"):
        worker.execute_model = partialmethod(_step_of_vllm, worker.execute_model)
        worker.shutdown = partialmethod(_shut_down_vllm, worker.shutdown)
        # `LLM.collective_rpc("nanwatch_report")` calls it for each worker.
        worker.nanwatch_report = lambda self: VllmModel.of(self).answer()


def _step_of_vllm(worker: Any, execute: Callable[..., Any], scheduled: Any, *args: Any, **kwargs: Any) -> Any:
    served = VllmModel.of(worker)
    with suppressing("a step of vLLM could not be followed"):
        served.follow(scheduled)
        # A watch from the load on would have vLLM compile the wrappers into code that later processes load.
        if any(not new.req_id.startswith(_WARM_UP) for new in scheduled.scheduled_new_reqs):
            served.start(worker.model_runner.get_model())
        served.step_begins(partial(served.shares, worker, scheduled))
    output = execute(worker, scheduled, *args, **kwargs)
    with suppressing("the rows of a step of vLLM could not be read"):
        state = worker.model_runner.execute_model_state
        served.step_ended(getattr(state, "hidden_states", None), getattr(state, "logits", None))
    return output


def _shut_down_vllm(worker: Any, shut_down: Callable[..., Any]) -> Any:
    with suppressing("the watch of a worker of vLLM could not be stopped"):
        VllmModel.of(worker).stop()
    return shut_down(worker)


def start_in_sglang() -> None:
    """Watch the model of each runner of this process from its first request on.

    Raises TypeError or ValueError for options of the environment that make no sense. SGLang logs it and serves. Written
    after SGLang's sources, and not run with it.
    """
    ServedModel()
    hooks = import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(_SGLANG_FORWARD, _forward_in_sglang, hooks.HookType.AROUND)


def _forward_in_sglang(
    forward: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run a step of a runner: what HookRegistry calls in the place of `ModelRunner.forward`."""
    served = ServedModel.of(runner)
    with suppressing("a step of SGLang could not be followed"):
        if batch.rids:
            served.start(runner.model)
        served.step_begins(partial(_sglang_shares, batch))
    output = forward(runner, batch, *args, **kwargs)
    with suppressing("the rows of a step of SGLang could not be read"):
        served.step_ended(getattr(output.logits_output, "next_token_logits", None))
    return output


def _sglang_shares(batch: Any) -> list[Share]:
    """Return the shares of a ForwardBatch, in which requests of one prefill have several rows each."""
    requests = batch.rids or ()
    if batch.forward_mode.is_extend():
        rows = zip(requests, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=False)
        return [Share(request, "prefill", num_tokens, position) for request, num_tokens, position in rows]
    lengths = (1,) * len(requests) if batch.seq_lens_cpu is None else batch.seq_lens_cpu.tolist()
    pairs = zip(requests, lengths, strict=False)
    return [Share(request, "decode", 1, length - 1) for request, length in pairs]
