"""The audited steps of this rank, for a comparison with other ranks, and the faults that it finds."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..recording.step_weight import StepComparison, StepWeight
from .samples import StepSamples, each_weight
from .suspicions import Fault, Suspect, gathered
from .window import Window


def check_ranks(comparison: StepComparison, samples: StepSamples, window: Window, num_forwards: int) -> None:
    """Hand a step to the comparison."""
    sizes = window.group_sizes()
    weights = []
    for weight in samples.of_optimizer():
        x = weight.tensor()
        if x is not None and weight.before is not None and weight.is_trained:
            size = None if x.grad is None else sizes.get(id(x.grad))
            name = ".".join(filter(None, weight.key))
            weights.append(StepWeight(name, x, weight.before, weight.gradient, size))
    comparison.check(samples.step, num_forwards, weights)


def rank_faults(comparison: StepComparison, model: nn.Module) -> Iterator[tuple[int, Fault]]:
    """Yield the faults that became certain since the last call, each with its step."""
    faults = comparison.faults()
    if not faults:
        return
    suspects = []
    for fault in faults:
        module, _, label = fault.name.rpartition(".")
        suspects.append(Suspect(fault.kind, module, label, {"rank": fault.rank}))
    trained = {(name, label): x.numel() for name, label, x in each_weight(model) if x.requires_grad}
    for gathered_fault in gathered(suspects, trained):
        yield min(fault.step for fault in faults), gathered_fault
