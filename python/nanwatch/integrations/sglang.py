"""Plugin for SGLang, which its entry point group `sglang.srt.plugins` starts in every process, without code of a user.

NANWATCH=1 switches it on. SGLang calls `forward` of the root past `nn.Module.__call__`, so that it is not seen. Written
after SGLang's sources, and not run with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from ..util.visible import suppressing
from .serving import ServedModel, Share

_FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"


def register() -> None:
    """Watch the model of each runner of this process from its first request on.

    Raises TypeError or ValueError for options of the environment that make no sense. SGLang logs it and serves.
    """
    ServedModel("sglang.nanwatch")
    hooks = import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(_FORWARD, _forward, hooks.HookType.AROUND)


def _forward(forward: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a step of a runner: what HookRegistry calls in the place of `ModelRunner.forward`."""
    served: ServedModel | None = vars(runner).get("_nanwatch")
    with suppressing("a step of SGLang could not be followed"):
        if served is None:
            served = runner._nanwatch = ServedModel("sglang.nanwatch")
        if batch.rids:
            served.start(runner.model)
        served.step_begins(partial(_shares, batch))
    output = forward(runner, batch, *args, **kwargs)
    with suppressing("the rows of a step of SGLang could not be read"):
        if served is not None:
            served.step_ended(getattr(output.logits_output, "next_token_logits", None))
    return output


def _shares(batch: Any) -> list[Share]:
    """Return the shares of a ForwardBatch, in which requests of one prefill have several rows each."""
    requests = batch.rids or ()
    if batch.forward_mode.is_extend():
        rows = zip(requests, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=False)
        return [Share(request, "prefill", num_tokens, position) for request, num_tokens, position in rows]
    lengths = (None,) * len(requests) if batch.seq_lens_cpu is None else batch.seq_lens_cpu.tolist()
    return [
        Share(request, "decode", 1, 0 if length is None else length - 1)
        for request, length in zip(requests, lengths, strict=False)
    ]
