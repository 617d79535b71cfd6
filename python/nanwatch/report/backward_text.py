"""What a report says of a backward that went wrong: why, and what to look at next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..numerics.formats import limits
from .headroom import is_near_end

if TYPE_CHECKING:
    from .finding import Finding
    from .frame import Frame
    from .record import Record


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
    """Where the bad gradient came from."""
    if finding.phase == "step":
        return "the step left it in what the optimizer keeps; the gradients that it took, or the state before it."
    outputs = _of_outputs(frame)
    if finding.origin == "produced":
        why = (
            "the backward of this module made it: the gradients of its outputs that were read are all finite"
        )
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
    """What to look at."""
    if finding.phase == "step":
        return "look at the gradients of this step and of the last ones, and at the format of the state."
    if finding.origin == "received" and finding.source_module is None:
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
    """The advice for a derivative that is not finite though its value and its operands are."""
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
    """Of the formats that the value went through the one that ends first, and its end.

    Under autocast that is not the gradient's own: of a float32 weight it is made in half, and converted then.
    """
    records = [*finding.operands, *([] if record is None else [record])]
    ends = {one.dtype: ends.largest for one in records if (ends := limits(one.dtype)) is not None}
    return min(ends.items(), key=lambda one: one[1], default=None)


def _of_outputs(frame: Frame | None) -> list[float]:
    records = () if frame is None else frame.records
    return [one.abs_max for one in records if one.isfinite and one.abs_max and one.label.startswith("output")]


def _finite(frame: Frame | None) -> list[float]:
    """The largest finite magnitudes of a frame's gradients."""
    found = []
    for one in () if frame is None else frame.records:
        if one.isfinite and one.abs_max is not None:
            found.append(one.abs_max)
        elif one.health is not None:
            found.append(one.health.finite_abs_max)
    return found
