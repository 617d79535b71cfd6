"""Plugin for vLLM, which its entry point group `vllm.general_plugins` starts in every process, without code of a user.

NANWATCH=1 switches it on. The decoder inside a model, a class under `support_torch_compile`, calls its
`forward` past `nn.Module.__call__` and is not seen. Its layers are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from ..util.imports import when_imported
from ..util.visible import suppressing
from .serving import ServedModel, Share

__all__ = ["register"]

# The workers of GPUs, CPUs and XPUs are this class or inherit from it.
WORKER_MODULE, _WORKER = "vllm.v1.worker.gpu_worker", "Worker"
# The requests with which a worker warms up are called _warmup_… and _v2_mixed_warmup….
_WARM_UP = "_"


def register() -> None:
    """Watch the model of each worker of this process from its first request on.

    Raises TypeError or ValueError for options of the environment that make no sense, before a model is loaded.
    """
    VllmModel()
    when_imported(WORKER_MODULE, patch)  # to import it here would choose the platform too early


class VllmModel(ServedModel):
    """The watched model of one worker, with the KV blocks of its requests, of which each step tells the new ones."""

    def __init__(self) -> None:
        super().__init__("vllm.nanwatch")
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
        progress |= zip(
            cached.req_ids,
            zip(cached.num_computed_tokens, cached.num_output_tokens, strict=False),
            strict=False,
        )
        size = worker.vllm_config.cache_config.block_size
        return [
            Share(
                request,
                "decode" if progress[request][1] else "prefill",
                scheduled.num_scheduled_tokens[request],
                progress[request][0],
                self._blocks.get(request, ()),
                size,
            )
            for request in batch.req_ids
            if request in scheduled.num_scheduled_tokens
        ]


def _only(groups: tuple[list[int], ...]) -> list[int]:
    """Return the blocks of the only group of a request; none for a hybrid model, whose layers have different ones."""
    return list(groups[0]) if len(groups) == 1 else []


def patch() -> None:
    """Let the worker of this process tell its `_nanwatch` of each step, by default a watched model."""
    worker = getattr(sys.modules[WORKER_MODULE], _WORKER)
    if not hasattr(worker, "nanwatch_report"):
        worker.execute_model = _followed(worker.execute_model)
        worker.shutdown = _after_stop(worker.shutdown)
        worker.nanwatch_report = _report


def _followed(execute: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(execute)
    def execute_model(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        served = _served(self)
        with suppressing("a step of vLLM could not be followed"):
            served.follow(scheduled)
            # Not when the model is loaded: vLLM would compile the wrappers into code that later processes load.
            if any(not new.req_id.startswith(_WARM_UP) for new in scheduled.scheduled_new_reqs):
                served.start(self.model_runner.get_model())
            served.step_begins(partial(served.shares, self, scheduled))
        output = execute(self, scheduled, *args, **kwargs)
        with suppressing("the rows of a step of vLLM could not be read"):
            state = self.model_runner.execute_model_state
            served.step_ended(getattr(state, "hidden_states", None), getattr(state, "logits", None))
        return output

    return execute_model


def _served(worker: Any) -> VllmModel:
    served: VllmModel | None = vars(worker).get("_nanwatch")
    if served is None:
        served = worker._nanwatch = VllmModel()
    return served


def _after_stop(shut_down: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(shut_down)
    def shutdown(self: Any) -> Any:
        with suppressing("the watch of a worker of vLLM could not be stopped"):
            _served(self).stop()
        return shut_down(self)

    return shutdown


def _report(self: Any) -> dict[str, Any]:
    """Return what `LLM.collective_rpc("nanwatch_report")` returns for each worker."""
    return _served(self).answer()
