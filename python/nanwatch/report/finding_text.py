"""The explanation and the advice of a report for a forward that went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..numerics.formats import limits
from ..records.headroom import is_near_end

if TYPE_CHECKING:
    from ..records.record import Frame, Record
    from .finding import Finding


def why_forward(finding: Finding, frame: Frame | None, frames: Sequence[Frame]) -> str:
    """Return in words where the non-finite value came from."""
    if finding.origin == "produced":
        is_function = finding.class_name == "Function"
        maker, read = ("function", "") if is_function else ("module", "weights, buffers and ")
        why = f"this {maker} made it: its {read}inputs that were read are all finite"
        records = () if frame is None else frame.records
        given = [r.abs_max for r in records if r.role == "input" and r.abs_max and r.isfinite]
        return f"{why} (largest input {max(given):.2e})." if given else f"{why}."
    if finding.origin == "weight":
        if finding.batch == 0:
            return "the weight was so before the first batch: an initialisation or a checkpoint wrote it."
        finite_in = _last_finite(finding, frames)
        if finite_in is not None:
            return (
                f"the weight was finite in batch {finite_in} and became so since the watch began:"
                " an optimizer step wrote it, or other code."
            )
        return (
            "the weight was so before this call: an optimizer step wrote it since the watch began, or a checkpoint"
            " did before, if no earlier batch used it."
        )
    if finding.origin == "buffer":
        return "the buffer was so when the call ended: running statistics that took in this input, or older."
    if finding.origin == "data":
        return (
            "the batch was called with it, and the model passed it on;"
            " or a module wrote it there, in place, as x.mul_() does to what it is given."
        )
    if finding.source_module is None:
        return "it was handed in from outside the modules that are watched."
    return (
        f"it was handed in by {finding.source_module or 'the root module'}, whose watched submodules had all been"
        " finite: code between their calls made it, or a submodule that is not watched,"
        f" or {finding.module or 'the root module'} itself if it writes into its input."
    )


# More are counted: a report is no list of a dataset.
_MOST_SAMPLES = 8


def samples_words(samples: Sequence[int]) -> str:
    """Return one sentence on the samples that carry the failure, "" without any."""
    if not samples:
        return ""
    if len(samples) == 1:
        return f"sample {samples[0]} of the batch carries it; without it: finite."
    shown = [str(sample) for sample in samples[:_MOST_SAMPLES]]
    last = f"{len(samples) - _MOST_SAMPLES:,} more" if len(samples) > _MOST_SAMPLES else shown.pop()
    return f"samples {', '.join(shown)} and {last} of the batch carry it; without them: finite."


def _last_finite(finding: Finding, frames: Sequence[Frame]) -> int | None:
    """Return the latest batch among `frames` in which the record of the finding was finite."""
    seen = [
        frame.batch
        for frame in frames
        for record in frame.records
        if (frame.name, frame.phase, record.label) == (finding.module, "forward", finding.label)
        and record.isfinite
        and frame.batch < finding.batch
    ]
    return max(seen, default=None)


def next_forward(
    finding: Finding, frame: Frame | None, record: Record | None, frames: Sequence[Frame]
) -> str:
    """Return the advice: what to look at."""
    if squared := _squared(finding, frame):
        return squared
    is_cured = any(cure.works for cure in finding.cures)
    if finding.origin in ("produced", "received") and not is_cured and (grown := _grown(frames)):
        return grown
    if finding.origin == "produced":
        ends = None if record is None else record.ends
        if "inf" in finding.value and frame is not None and record is not None and ends is not None:
            dtype, end = record.dtype, f"{ends.largest:.6g}"
            largest = _largest_finite(frame, record)
            if is_near_end(largest, ends.largest):
                return f"{dtype} ends at {end}; follow the abs max column up to where it began to grow."
            if is_cured:
                return _CURED
            return (
                f"{dtype} ends at {end}, and nothing in this frame is above {largest:.2e}: look for a division by"
                " zero, a logarithm of zero, an exponential or the like."
            )
        return _CURED if is_cured else "look at the inputs and weights of this module in its frame."
    if finding.origin == "weight":
        if finding.batch == 0:
            return (
                "look at how the weight is initialised, and at the checkpoint that was loaded; where a training wrote"
                f" it, {_GRADIENTS} in that training finds a bad gradient before a step takes it."
            )
        step = "look at the loss scale and the learning rate of the step before"
        if any(one.phase == "backward" for one in frames):
            return f"{step}."
        return f"{_GRADIENTS} finds a bad gradient before a step takes it; {step}."
    if finding.origin == "buffer":
        return "look at what was last written to this buffer."
    if finding.origin == "data":
        return (
            "look at the data loader and the preprocessing of this batch;"
            " where they are clean, for in-place operations on the model's input."
        )
    return (
        _CURED
        if is_cured
        else "look at the forward of the module that handed it in, from the last finite frame on."
    )


# With the option of `nanwatch run`, whose user writes no call of watch.
_GRADIENTS = "watch(model, gradients=True) (--gradients)"
_CURED = "apply the cure if it is what the model should compute: it was tried on this batch only."

# Kernels that square what they are given. For half precision they do so in float32.
_SQUARES = (
    "layer_norm",
    "group_norm",
    "batch_norm",
    "rms_norm",
    "vector_norm",
    "aten.norm.",
    "aten.var",
    "aten.std",
)


def _squared(finding: Finding, frame: Frame | None) -> str:
    """Return the advice if the square of a norm's operand leaves the format of the norm, else ""."""
    if finding.origin not in ("produced", "buffer") or not (
        any(name in finding.operation for name in _SQUARES)
        if finding.operation
        else "Norm" in finding.class_name
    ):
        return ""
    inputs = [] if frame is None else [one for one in frame.records if one.role == "input"]
    given = [one for one in (finding.operands or inputs) if _is_finite_float(one) and one.abs_max]
    for one in given:
        dtype = "float32" if one.dtype in ("float16", "bfloat16") else one.dtype
        ends = limits(dtype)
        if ends is not None and one.abs_max is not None and one.abs_max > ends.largest**0.5:
            return (
                f"a norm squares its input, and the square of {one.abs_max:.2e} leaves {dtype}, which ends at"
                f" {ends.largest:.6g}: find where the input grew, or divide it before the norm."
            )
    return ""


# A weight that grows a hundredfold within the batches of a report does so by its steps.
_GROWN = 100.0


def _grown(frames: Sequence[Frame]) -> str:
    """Return the advice if a weight grew with each batch, so that no change of one call is a cure; else ""."""
    seen: dict[tuple[str, str], dict[int, float]] = {}
    for frame in frames:
        for record in frame.records:
            if record.role == "weight" and record.isfinite and record.abs_max:
                seen.setdefault((frame.name, record.label), {})[frame.batch] = record.abs_max
    factor, found = _GROWN, ""
    for (name, label), magnitudes in seen.items():
        largest = list(magnitudes.values())
        if len(largest) > 1 and largest == sorted(largest) and largest[-1] / largest[0] >= factor:
            factor = largest[-1] / largest[0]
            found = (
                f"`{label}` of {name or 'the root module'} grew from {largest[0]:.2e} in batch {min(magnitudes)} to"
                f" {largest[-1]:.2e} in batch {max(magnitudes)}, by the steps of the optimizer: lower the learning"
                " rate, or clip the gradients before each step with torch.nn.utils.clip_grad_norm_."
            )
    return found


def _largest_finite(frame: Frame, culprit: Record) -> float:
    """Return the largest finite magnitude among the inputs and the outputs of the call."""
    seen = [one.abs_max for one in frame.records if _is_finite_float(one) and one.role != "output"]
    if culprit.health is not None:
        seen.append(culprit.health.finite_abs_max)
    return max((one for one in seen if one is not None), default=0.0)


def _is_finite_float(record: Record) -> bool:
    # Token numbers are large and overflow nothing.
    return record.isfinite is True and "float" in record.dtype


_POLES = (
    "look for a root, a norm, a logarithm, a power or a division at zero: its value is finite there and its derivative"
    " is not. A torch.where behind it does not help, as 0 times inf is nan: change what goes in."
)
# Where no operand was seen.
_UNSEEN = (
    "look for a derivative that is not finite where its value is: that of a power or a product that leaves its format,"
    " or that of a root, a norm, a logarithm or a division whose input is zero. A torch.where behind it does not help,"
    " as 0 times inf is nan: change what goes in."
)


def why_backward(finding: Finding, frame: Frame | None) -> str:
    """Return in words where the non-finite gradient came from."""
    if finding.phase == "step":
        return "the step left it in what the optimizer keeps; the gradients that it took, or the state before it."
    outputs = _of_outputs(frame)
    if finding.origin == "produced":
        maker = "function" if finding.class_name == "Function" else "module"
        why = f"the backward of this {maker} made it: the gradients of its outputs that were read are all finite"
        return f"{why} (largest {max(outputs):.2e})." if outputs else f"{why}."
    if finding.source_module is not None:
        name = finding.source_module or "the root module"
        return (
            f"it came out of the backward of {name}, which had been given finite gradients: code between the calls of"
            " its submodules made it, or a submodule that is not watched."
        )
    if finding.label.startswith("output"):
        return "it came from the loss, or from what lies between the model's output and the loss."
    return (
        "no gradient of this module's outputs was seen, as its calls are compiled or its weight is used without it:"
        " where the value was made is not known."
    )


def next_backward(finding: Finding, frame: Frame | None, record: Record | None) -> str:
    """Say what the user should look at next."""
    if finding.phase == "step":
        return "look at the gradients of this step and of the last ones, and at the format of the state."
    # The advice on a derivative does not fit an operation of the forward, or of a loss.
    is_behind = finding.origin == "received" and finding.source_module is None
    is_of_forward = is_behind or (finding.operation or "").startswith("aten.")
    if is_of_forward and any(cure.works and (cure.patch or cure.code) for cure in finding.cures):
        return _CURED
    if is_behind:
        return "look at the loss, at what it is scaled with, and at what is computed from the model's output."
    if finding.origin == "received" and finding.value == "inf":
        return (
            "look for a format with a shorter range that the gradient passes through, and lower the loss scale;"
            f" without one, {_UNSEEN}"
        )
    narrow = _narrowest(finding, record)
    if finding.value == "inf" and narrow is not None:
        largest = max(_finite(frame), default=0.0)
        dtype, end = narrow
        if is_near_end(largest, end):
            return (
                f"{dtype} ends at {end:.6g}: lower the loss scale, or let this module's backward run in a wider"
                " format."
            )
    return _derivative(finding, narrow)


def _derivative(finding: Finding, narrow: tuple[str, float] | None) -> str:
    """Return the advice for a non-finite derivative of finite value and operands."""
    is_of_forward = (finding.operation or "").startswith("aten.")
    if is_of_forward or any(one.isfinite is False for one in finding.operands):
        return "keep what the forward's operation is given inside its domain, and what it makes inside its format."
    kept = [
        one for one in finding.operands if not one.label.startswith("gradient") and one.abs_max is not None
    ]
    is_cured = any(cure.works and "run_in_fp32(" in cure.what for cure in finding.cures)
    if narrow is None or not (kept or is_cured):
        return _UNSEEN
    if any(one.abs_min == 0 for one in kept) and not is_cured:
        return _POLES
    dtype, end = narrow
    of = f", with operands up to {max(one.abs_max or 0.0 for one in kept):.2e}" if kept else ""
    leaves = f"the derivative leaves {dtype}, which ends at {end:.6g}{of}"
    if is_cured:
        return f"{leaves}: let this module run in float32, as the cure says."
    return (
        f"no operand is zero, so {leaves}: make what goes in smaller, or take a wider format. The poles of acos, atanh"
        " and the like lie at 1."
    )


def _narrowest(finding: Finding, record: Record | None) -> tuple[str, float] | None:
    """Return the narrowest format that the value went through, and its largest number.

    Under autocast that is not the gradient's own: of a float32 weight it is made in half, and converted then.
    """
    records = [*finding.operands, *([] if record is None else [record])]
    ends = {one.dtype: ends.largest for one in records if (ends := one.ends) is not None}
    return min(ends.items(), key=lambda one: one[1], default=None)


def _of_outputs(frame: Frame | None) -> list[float]:
    records = () if frame is None else frame.records
    return [one.abs_max for one in records if one.isfinite and one.abs_max and one.label.startswith("output")]


def _finite(frame: Frame | None) -> list[float]:
    """Return the largest finite magnitudes of a frame's gradients."""
    found = []
    for one in () if frame is None else frame.records:
        if one.isfinite and one.abs_max is not None:
            found.append(one.abs_max)
        elif one.health is not None:
            found.append(one.health.finite_abs_max)
    return found
