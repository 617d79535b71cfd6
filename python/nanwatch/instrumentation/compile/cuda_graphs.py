"""Whether Inductor will capture what Dynamo traces into a CUDA graph, as `mode="reduce-overhead"` asks it to.

Inductor cuts a graph where it meets an operator on the host, and captures what is between the cuts. The operators of
watched calls would be such, and cut the graph at every call, as they are said to write to `sequence`, a number in host
memory. Where a whole batch is traced for one device they are given a number on that device instead, and are captured
with the rest (graph_rows.h); one operator stays outside, before all of them, and looks at what replays have left.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from ...numerics import _extension

DEVICE_TYPE = "cuda"
_INDUCTOR = "torch._inductor.config"
# What has to be on in Inductor, by its name for it: `triton.cudagraph_trees` allow what is captured to write to
# memory that stays, and without `graph_partition` one operator on the host is enough for no capture at all.
_NEEDED = (
    "triton.cudagraphs",
    "triton.cudagraph_trees",
    "triton.cudagraph_support_input_mutation",
    "graph_partition",
)


def captured_on(tx: Any, recorder: Any, devices: Iterable[torch.device]) -> torch.device | None:
    """The device of the CUDA graph that the batch of an outermost call will be captured into; None for none.

    `devices` are those of the call's tensors. With two of them Inductor captures nothing.
    """
    if not _can_be_captured(recorder) or not all(_setting(tx, name) for name in _NEEDED):
        return None
    found = {device for device in devices if device.type == DEVICE_TYPE}
    return found.pop() if len(found) == 1 else None


def _can_be_captured(recorder: Any) -> bool:
    """Not a part of a batch that is under way, and not by the Python recorder, which waits for each row."""
    native = _extension.C
    if native is None or not isinstance(recorder, native.CallRecorder) or native.device_backend() == 0:
        return False
    return not recorder.is_under_way


def _setting(tx: Any, name: str) -> bool:
    """As torch.compile was told; else as it is everywhere."""
    backend = tx.output.compiler_fn
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    own = getattr(backend, "config", None)
    if not isinstance(own, dict):  # as Inductor's has
        return False
    if name in own:
        return bool(own[name])
    value: Any = sys.modules.get(_INDUCTOR)
    for part in name.split("."):
        value = getattr(value, part, None)
    return bool(value)
