"""Reason and advice of a finding: as facts with a code and values, and the sentences that say them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..numerics.formats import limits
from ..records.record import is_near_end
from ..util.messages import module_name
from .finding import LOSS

if TYPE_CHECKING:
    from ..records.record import Frame, Record
    from .finding import Finding


class Statement(NamedTuple):
    """Reason or advice: its code, one of those in `SENTENCES`, and the values that its sentence names."""

    code: str
    values: dict[str, str | int | float | None]

    def __str__(self) -> str:
        known = [(name, value) for name, value in self.values.items() if value is not None]
        spelt = {name: _SPELT.get(name, str)(value) for name, value in known}
        return SENTENCES[self.code].format_map(dict.fromkeys(self.values, "") | spelt)


class Explanation(NamedTuple):
    """Why a value is not finite, as far as its frames show, and what to look at next."""

    reason: Statement
    advice: Statement


def explain(
    finding: Finding, frame: Frame | None, record: Record | None, frames: Sequence[Frame]
) -> Explanation:
    """Return the explanation of a finding, which is of this record of this frame, where these are among `frames`."""
    if finding.phase == "save":
        return Explanation(_of("in a checkpoint"), _of("writer of the weight"))
    if finding.phase == "forward":
        reason, advice = _why_forward(finding, frame, frames), _next_forward(finding, frame, record, frames)
    else:
        reason, advice = _why_backward(finding, frame), _next_backward(finding, frame, record)
    if (finding.operation or "").startswith(("aten.empty", "aten.new_empty")):
        advice = _of("unwritten memory")
    elif finding.losses or any(cure.works and "without the change" in cure.effect for cure in finding.cures):
        advice = _of("divergence")
    elif finding.transient:
        advice = _of("unsteady")
    return Explanation(reason, advice)


def _of(code: str, **values: str | int | float | None) -> Statement:
    return Statement(code, values)


# How the sentences spell a value, by its name. A value of None is left out.
_SPELT: dict[str, Callable[[Any], str]] = {
    "largest_input": " (largest input {:.2e})".format,
    "largest_gradient": " (largest {:.2e})".format,
    "operands": ", with operands up to {:.2e}".format,
    "end": "{:.6g}".format,
    "largest": "{:.2e}".format,
    "module": module_name,
    "giver": module_name,
}
# With the option of `nanwatch run`, whose user writes no call of watch.
_GRADIENTS = "watch(model, gradients=True) (--gradients)"
_STEP = "look at the loss scale and the learning rate of the step before"
# Where no operand was seen.
_UNSEEN = (
    "look for a derivative that is not finite where its value is: that of a power or a product that leaves its format,"
    " or that of a root, a norm, a logarithm or a division whose input is zero. A torch.where behind it does not help,"
    " as 0 times inf is nan: change what goes in."
)

SENTENCES = {
    # Reasons.
    "made by the module": "this module made it: its weights, buffers and inputs that were read are all"
    " finite{largest_input}.",
    "written into its input": "this module wrote it into what it was given, in place.",
    "made by the caller": "it was handed in by {giver}: the code of its forward, between the calls of its submodules,"
    " made it.",
    "made by the function": "this function made it: its inputs that were read are all finite{largest_input}.",
    "weight before the first batch": "the weight was not finite when it was first read: an initialisation,"
    " a checkpoint or code in a forward wrote it.",
    "weight since a batch": "the weight was finite in batch {batch} and is not any more: an optimizer step wrote it, or"
    " other code.",
    "weight since the forward": "the weight was finite in the latest forward and is not any more: an optimizer step"
    " wrote it, or other code.",
    "weight of a finite gradient": "the optimizer's step wrote it, with a finite gradient.",
    "weight of a bad gradient": "the optimizer's step wrote it, with a gradient that was not finite.",
    "weight before the call": "the weight was not finite before this call: an optimizer step wrote it since the watch"
    " began, or a checkpoint did before, if no earlier batch used it.",
    "buffer": "the buffer was not finite when the call ended: in training mode running statistics take in the input;"
    " otherwise an initialisation, a checkpoint or other code wrote it.",
    "buffer before the call": "the buffer was not finite before this call, whose inputs are: other code wrote it.",
    "data": "the model was called with it.",
    "data, or a write in place": "the model was called with it; or a module wrote it there, in place, as x.mul_() does"
    " to what it is given.",
    "from outside": "it was handed in from outside the modules that are watched.",
    "from the caller": "it was handed in by {giver}, whose watched submodules had all been finite: code between their"
    " calls made it, or a submodule that is not watched, or {module} itself if it writes into its input.",
    "learning rate": "a schedule or other code of the program wrote it. A step with it leaves no weight finite.",
    "optimizer step": "the step left it in the optimizer's state, because of the gradients that it took or of the state"
    " before.",
    "gradient at the step": "the step was about to take it, and each backward on this rank brought finite gradients:"
    " code between backward() and the step wrote it, or it is a sum of several backwards or ranks.",
    "in a checkpoint": "it was not finite when it was saved: an optimizer step wrote it since the last forward, or"
    " other code, such as an average of weights or a checkpoint that was loaded.",
    "made by the module's backward": "the backward of this module made it: the gradients of its outputs that were read"
    " are all finite{largest_gradient}.",
    "made by the function's backward": "the backward of this function made it: the gradients of its outputs that were"
    " read are all finite{largest_gradient}.",
    "from a backward": "it came out of the backward of {giver}: its own code made it, between the calls of its"
    " submodules if it has any, or a submodule that is not watched.",
    "data of the loss": "the loss was given it: it was in the labels, or in other data that the loss reads.",
    "loss itself": "it was computed from outputs of the model that were finite.",
    "from the loss": "it came from the loss, or from what lies between the model's output and the loss.",
    "gradient of unknown origin": "no gradient of this module's outputs was seen: by default those of the model's"
    " outputs alone are read, and none of compiled calls, or of a weight used without its module.",
    # Advice.
    "apply the cure": "apply the cure if it is what the model should compute: it was tried on this batch only.",
    "square of the input": "a norm squares its input, and the square of {largest} leaves {dtype}, which ends at {end}:"
    " find where the input grew, or divide it before the norm.",
    "growth up to the end": "{dtype} ends at {end}; follow the abs max column up to where it began to grow.",
    "inf of moderate values": "{dtype} ends at {end}, and nothing in this frame is above {largest}: look for a division"
    " by zero, a logarithm of zero, an exponential or the like.",
    "inputs and weights": "look at the inputs and weights of this module in its frame.",
    "initialisation": "look at how the weight is initialised, and at the checkpoint that was loaded; where a training"
    f" wrote it, {_GRADIENTS} in that training finds a bad gradient before a step takes it.",
    "step": f"{_STEP}.",
    "cure of the step": "make the optimizer anew as the cure says, and start from weights of before the step.",
    "gradients and step": f"{_GRADIENTS} finds a bad gradient before a step takes it; {_STEP}.",
    "unwritten memory": "write all of this memory before it is read, or allocate it with zeros.",
    "writer of the buffer": "look at what was last written to this buffer.",
    "data loader": "look at the data loader and the preprocessing of this batch. If the value is meant, as that of a"
    " missing reading, watch with {option}.",
    "cure or data loader": "apply the cure if the value is meant, as that of a missing reading; else look at the data"
    " loader and the preprocessing of this batch.",
    "code outside": "look at the code that called this module: a part of the model in another thread, a coroutine, a"
    " generator or a backward, or code that calls parts of the model itself.",
    "forward of the caller": "look at the forward of the module that handed it in, from the last finite frame on.",
    "schedule": "look at how the learning rate of this step is computed: for a division by a number of steps that is 0,"
    " or a power or a root of a negative number.",
    "arithmetic of the step": "guard what the step divides by, as an eps does, or lower the learning rate, or keep"
    " weights and state in a wider format. Start again from weights of before this step.",
    "divergence": "the steps are too large, or go the wrong way: lower the learning rate, look at its sign and its"
    " schedule, or bring inputs and targets to a scale of 1.",
    "unsteady": "look for memory that is read before it is written, as torch.empty() makes it, for what the model keeps"
    " from batch to batch, and for threads or streams that write to the same tensor.",
    "optimizer state": "look at the learning rate, at the latest gradients, and at the format of the state.",
    "writer of the gradient": "look at what happens to gradients between backward() and the step, such as a division by"
    " a number of tokens; at the sum of several backwards in a short format; at the reports of the other ranks.",
    "writer of the weight": f"look at what wrote it last; {_GRADIENTS} finds a bad gradient before a step takes it.",
    "labels": "look at the data: at the loader and the preprocessing of this batch, and at its labels.",
    "loss": "look at the loss, at what it is scaled with, and at what is computed from the model's output.",
    "short format": "look for a format with a shorter range that the gradient passes through, and lower the loss scale;"
    f" without one, {_UNSEEN}",
    "loss scale": "{dtype} ends at {end}: make the loss or its scale smaller, or use a wider format in this backward.",
    "domain of the forward": "keep what the forward's operation is given inside its domain, and what it makes inside"
    " its format.",
    "unseen derivative": _UNSEEN,
    "derivative at zero": "look for a root, a norm, a logarithm, a power or a division at zero: its value is finite"
    " there and its derivative is not. A torch.where behind it does not help, as 0 times inf is nan: change what goes"
    " in.",
    "large derivative": "no operand is zero, so the derivative leaves {dtype}, which ends at {end}{operands}: make what"
    " goes in smaller, or take a wider format. The poles of acos, atanh and the like lie at 1.",
}


def _why_forward(finding: Finding, frame: Frame | None, frames: Sequence[Frame]) -> Statement:
    if finding.origin == "produced":
        if finding.label.startswith("input"):
            return _of("written into its input")
        records = () if frame is None else frame.records
        peaks = [r.abs_max for r in records if r.role == "input" and r.abs_max and r.isfinite]
        maker = "function" if finding.class_name == "Function" else "module"
        return _of(f"made by the {maker}", largest_input=max(peaks, default=None))
    if finding.origin == "weight":
        if finding.batch == 0:
            return _of("weight before the first batch")
        batch = _last_finite(finding, frames)
        return _of("weight before the call") if batch is None else _of("weight since a batch", batch=batch)
    inputs = [] if frame is None else [record for record in frame.records if record.role == "input"]
    # Running statistics take in squares. Any other buffer may be of what its module computes.
    are_statistics = finding.label.startswith("running_") and "BatchNorm" in finding.class_name
    is_wide = frame is not None and frame.fault is not None and frame.fault.dtype != "float16"
    are_moderate = all(_is_finite_float(x) and (x.abs_max or 0.0) < 1e19 for x in inputs)
    if are_statistics and is_wide and inputs and are_moderate:
        return _of("buffer before the call")
    if finding.origin == "data" and not finding.extent:  # no re-run has compared versions
        return _of("data, or a write in place")
    if finding.origin != "received":
        return _of(finding.origin)
    if finding.source_module is None:
        return _of("from outside")
    if finding.operation is not None:
        return _of("made by the caller", giver=finding.source_module)
    return _of("from the caller", giver=finding.source_module, module=finding.module)


def _last_finite(finding: Finding, frames: Sequence[Frame]) -> int | None:
    forward = finding.module, "forward"
    earlier = [x for x in frames if (x.name, x.phase) == forward and x.batch < finding.batch]
    records = ((frame.batch, record) for frame in earlier for record in frame.records)
    finite = (batch for batch, record in records if record.label == finding.label and record.isfinite)
    return max(finite, default=None)


def _next_forward(
    finding: Finding, frame: Frame | None, record: Record | None, frames: Sequence[Frame]
) -> Statement:
    if squared := _squared(finding, frame):
        return squared
    is_cured = any(cure.works for cure in finding.cures)
    if finding.origin == "produced":
        ends = None if record is None else record.ends
        if "inf" in finding.value and frame is not None and record is not None and ends is not None:
            largest, dtype = _largest_finite(frame, record), record.dtype
            if is_near_end(largest, ends.largest):
                return _of("growth up to the end", dtype=dtype, end=ends.largest)
            if not is_cured:
                return _of("inf of moderate values", dtype=dtype, end=ends.largest, largest=largest)
        return _of("apply the cure" if is_cured else "inputs and weights")
    if finding.origin == "weight":
        if finding.batch == 0:
            return _of("initialisation")
        return _next_weight(finding, after_backward=any(frame.phase == "backward" for frame in frames))
    if finding.origin == "received":
        if is_cured:
            return _of("apply the cure")
        return _of("code outside" if finding.source_module is None else "forward of the caller")
    if finding.origin == "buffer":
        return _of("writer of the buffer")
    if is_cured:
        return _of("cure or data loader")
    value = "nan" if "nan" in finding.value else "inf"
    excuse = f"{value}:{finding.module or '(root)'}"
    return _of("data loader", option=f"allow={excuse!r}")


def _next_weight(finding: Finding, *, after_backward: bool) -> Statement:
    if any(cure.works for cure in finding.cures):
        return _of("cure of the step")
    if finding.phase == "step" and (is_finite := _has_finite_gradient(finding)) is not None:
        return _of("arithmetic of the step" if is_finite else "gradients and step")
    return _of("step" if after_backward else "gradients and step")


def _has_finite_gradient(finding: Finding) -> bool | None:
    """Return whether the step took a finite gradient; None where that was not seen."""
    gradients = [x for x in finding.operands if x.role == "gradient"]
    return all(x.isfinite for x in gradients) if gradients else None


# Kernels that square what they are given. For half precision they do so in float32.
_SQUARES = (
    *("layer_norm", "group_norm", "batch_norm", "rms_norm", "vector_norm", "aten.norm."),
    *("aten.var", "aten.std"),
)


def _squared(finding: Finding, frame: Frame | None) -> Statement | None:
    """Return the advice if the square of a norm's operand leaves the format of the norm."""
    names, kernel = (_SQUARES, finding.operation) if finding.operation else (("Norm",), finding.class_name)
    if finding.origin not in ("produced", "buffer") or not any(name in kernel for name in names):
        return None
    inputs = [] if frame is None else [record for record in frame.records if record.role == "input"]
    for operand in filter(_is_finite_float, finding.operands or inputs):
        dtype = "float32" if operand.dtype in ("float16", "bfloat16") else operand.dtype
        ends, largest = limits(dtype), operand.abs_max or 0.0
        if ends is not None and largest > ends.largest**0.5:
            return _of("square of the input", largest=largest, dtype=dtype, end=ends.largest)
    return None


def _largest_finite(frame: Frame, culprit: Record) -> float:
    finite = [record for record in frame.records if _is_finite_float(record) and record.role != "output"]
    sizes = [record.abs_max or 0.0 for record in finite]
    return max([*sizes, 0.0 if culprit.health is None else culprit.health.finite_abs_max])


def _is_finite_float(record: Record) -> bool:
    # Token numbers are large and overflow nothing.
    return record.isfinite is True and "float" in record.dtype


def _why_backward(finding: Finding, frame: Frame | None) -> Statement:
    if finding.phase == "step":
        if finding.origin == "weight":
            is_finite = _has_finite_gradient(finding)
            kinds = {None: "since the forward", True: "of a finite gradient", False: "of a bad gradient"}
            return _of(f"weight {kinds[is_finite]}")
        if finding.label.startswith("lr["):
            return _of("learning rate")
        return _of("gradient at the step" if finding.label.endswith(".grad") else "optimizer step")
    if finding.origin == "produced":
        records = () if frame is None else frame.records
        peaks = [r.abs_max for r in records if r.isfinite and r.abs_max and r.label.startswith("output")]
        maker = "function" if finding.class_name == "Function" else "module"
        return _of(f"made by the {maker}'s backward", largest_gradient=max(peaks, default=None))
    if finding.source_module is not None:
        return _of("from a backward", giver=finding.source_module)
    if finding.origin == "data":
        return _of("data of the loss")
    if finding.module == LOSS:
        return _of("loss itself")
    is_known = finding.label.startswith("output") or finding.operation is not None
    return _of("from the loss" if is_known else "gradient of unknown origin")


def _next_backward(finding: Finding, frame: Frame | None, record: Record | None) -> Statement:
    if finding.phase == "step":
        if finding.origin == "weight":
            return _next_weight(finding, after_backward=True)
        if finding.label.startswith("lr["):
            return _of("schedule")
        return _of("writer of the gradient" if finding.label.endswith(".grad") else "optimizer state")
    if any(cure.works and (cure.patch or cure.code) for cure in finding.cures):
        return _of("apply the cure")
    if finding.is_of_loss:  # advice on a derivative does not fit
        return _of("labels" if finding.origin == "data" else "loss")
    if finding.origin == "received" and finding.value in ("inf", "-inf"):
        return _of("short format")
    narrow = _narrowest(finding, record)
    if finding.value in ("inf", "-inf") and narrow is not None:
        dtype, end = narrow
        if is_near_end(max(_finite_gradients(frame), default=0.0), end):
            return _of("loss scale", dtype=dtype, end=end)
    return _derivative(finding, narrow)


def _derivative(finding: Finding, narrow: tuple[str, float] | None) -> Statement:
    """Return the advice for a non-finite derivative of finite value and operands."""
    is_of_forward = (finding.operation or "").startswith("aten.")
    if is_of_forward or any(operand.isfinite is False for operand in finding.operands):
        return _of("domain of the forward")
    read = [operand for operand in finding.operands if operand.abs_max is not None]
    kept = [operand for operand in read if not operand.label.startswith("gradient")]
    if any(cure.works and "run_in_fp32(" in cure.what for cure in finding.cures):
        return _of("apply the cure")
    if narrow is None or not kept:
        return _of("unseen derivative")
    if any(operand.abs_min == 0 for operand in kept):
        return _of("derivative at zero")
    dtype, end = narrow
    largest = max(operand.abs_max or 0.0 for operand in kept)
    return _of("large derivative", dtype=dtype, end=end, operands=largest)


def _narrowest(finding: Finding, record: Record | None) -> tuple[str, float] | None:
    """Return the narrowest format that the value went through, and its largest number.

    Under autocast that is not the gradient's own: of a float32 weight it is made in half, and converted then.
    """
    records = [*finding.operands, *([] if record is None else [record])]
    ends = {operand.dtype: ends.largest for operand in records if (ends := operand.ends) is not None}
    return min(ends.items(), key=itemgetter(1), default=None)


def _finite_gradients(frame: Frame | None) -> Iterable[float]:
    for record in () if frame is None else frame.records:
        if record.isfinite and record.abs_max is not None:
            yield record.abs_max
        elif record.health is not None:
            yield record.health.finite_abs_max
