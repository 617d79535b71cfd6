"""`replay`: make a capsule's call again, watched."""

from __future__ import annotations

import os
import warnings

import torch
from torch import nn

from ..capsule.capsule import Capsule
from ..capsule.replay import Model, Replayed, call_again
from ..report.report import Report
from ..util.visible import visible
from .options import SWITCH, Options
from .watch import Watch


def replay(
    capsule: Capsule | str | os.PathLike[str],
    model: Model,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Report:
    """Make a capsule's call again, watched, without gradients, and return its report.

    After a failure the call runs a few times more, as a batch does under `watch`, for the operation and for cures.

    The call has the capsule's weights, inputs, random states, autocast and training flags. `model`, the caller's random
    states and the capsule stay as they are. `report.finding` is None when all was finite this time.

    Args:
        capsule: a Capsule, or its folder.
        model: the whole model, the module of the capsule, or a callable that makes one of the two.
        dtype: cast weights and inputs of floating point to it, and leave autocast off.
        device: where to run; None for the device of the recorded call, or the CPU where that is missing.

    `report.finding.remarks` lists differences from the recorded call. When all was finite, each is a RuntimeWarning.

    Raises CapsuleError for a folder that is no capsule, ValueError where model and capsule do not fit or an input was
    left out, and the errors of the call itself.

    Examples:
        >>> import nanwatch, torch
        >>> layer = torch.nn.LayerNorm(2, eps=0.0)
        >>> folder = nanwatch.write_capsule("call", layer, "norm", [torch.zeros(1, 2)])
        >>> report = nanwatch.replay(folder, layer)
        >>> report.finding.value, report.finding.label
        ('nan', 'output')
    """
    done = rerun(capsule if isinstance(capsule, Capsule) else Capsule.open(capsule), model, dtype, device)
    if done.report.finding is None:
        for remark in done.remarks:
            warnings.warn(visible(f"replay: {remark}"), RuntimeWarning, stacklevel=2)
    return done.report


def rerun(
    capsule: Capsule, model: Model, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Replayed:
    """Do the same as `replay`, and return the remarks beside the report."""
    if os.environ.get(SWITCH) == "0":
        raise ValueError(f"{SWITCH}=0 switches every watch off, and a replay is nothing without; unset it")
    return call_again(capsule, model, _watch, dtype, device)


def _watch(module: nn.Module) -> Watch:
    # The re-run comes when the call is over.
    return Watch(module, Options(on_nonfinite=lambda _: None, act_at="batch", rerun=True))
