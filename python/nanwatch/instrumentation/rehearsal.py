"""The calls by which a pipeline stage learns the shapes of its tensors: nobody's batch, and not recorded.

Before its first batch torch.distributed.pipelining calls the stage's module, and its backward, on memory that was never
written. What is in there may be nan.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

from torch import nn

from ..util._when_imported import when_imported
from ..util.user_warning import warn_user

_STAGE = "torch.distributed.pipelining.stage"
# The first is the name in torch 2.8, which rehearses on zeros; the others are those of 2.13.
_REHEARSALS = ("_shape_inference", "_forward_metadata_inference", "_backward_metadata_inference")


@functools.cache
def install() -> None:
    """Leave such calls unrecorded from now on: at once, or when pipelining is imported, which may never happen."""
    when_imported(_STAGE, _change_stage)


def _change_stage() -> None:
    try:
        from torch.distributed.pipelining.stage import PipelineStage

        for name in _REHEARSALS:
            if hasattr(PipelineStage, name):
                setattr(PipelineStage, name, _unrecorded(getattr(PipelineStage, name)))
    except Exception as error:  # the import is the user's
        warn_user(
            "nanwatch: what a pipeline stage runs to learn the shapes of its tensors is taken for batches"
            f" ({type(error).__name__}: {error})"
        )


def _unrecorded(rehearse: Any) -> Any:
    @functools.wraps(rehearse)
    def unrecorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        from .turn import unwatched

        module = getattr(self, "submod", None)
        with unwatched(module) if isinstance(module, nn.Module) else nullcontext():
            return rehearse(self, *args, **kwargs)

    return unrecorded
