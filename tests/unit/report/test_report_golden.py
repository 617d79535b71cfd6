"""Text of reports of the failures that users meet is that in tests/golden; `pytest --update-golden` writes it anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan, prod

import pytest

from nanwatch.numerics.formats import TensorHealth
from nanwatch.records.record import Frame, Note, Record, Role
from nanwatch.report.finding import Cure, Finding, Place, find
from nanwatch.report.report import Report
from support.html_page import unread

SHAPE = (4, 128)
SQUARE = (128, 128)


def _read(
    label: str,
    role: Role,
    low: float,
    high: float,
    dtype: str = "float32",
    shape: tuple[int, ...] = SHAPE,
    note: Note | None = None,
) -> Record:
    """A record whose elements are all finite."""
    return Record(label, role, shape, dtype, low, high, True, None, note)


def _spoilt(
    plain: Record, *, nans: int = 0, infs: int = 0, neginfs: int = 0, first: tuple[int, ...] = (0, 0)
) -> Record:
    """The same record with so many nan and inf among its elements, the first of them at that index."""
    low, high, numel = plain.abs_min or 0.0, plain.abs_max or 0.0, prod(plain.shape or ())
    if nans + infs + neginfs == numel:
        low = high = nan if nans else inf
    ends = (nan, nan) if nans else (low, inf)
    health = TensorHealth(*ends, False, low, high, nans, infs, neginfs, 0, 0, numel, first)
    return plain._replace(abs_min=ends[0], abs_max=ends[1], isfinite=False, health=health)


def _linear(batch: int, name: str, given: float, made: float | Record, dtype: str = "float32") -> Frame:
    """The frame of a Linear layer."""
    weight = _read("weight", "weight", 1.25e-6, 0.5, dtype, SQUARE)
    output = made if isinstance(made, Record) else _read("output", "output", 1e-3, made, dtype)
    return Frame(batch, name, "Linear", (weight, _read("input[0]", "input", 1e-3, given, dtype), output))


def _failed(frames: tuple[Frame, ...], batch: int, finding: Finding | None, **found: object) -> Report:
    return Report(frames, replace(finding, **found), batch, finding.rank)  # type: ignore[arg-type]


def _with_zeros(high: float, zeros: int, numel: int) -> TensorHealth:
    """The health of a finite tensor, so many elements of which are zero."""
    return TensorHealth(0.0, high, True, 0.0, high, 0, 0, 0, zeros, 0, numel, None)


_PATCH = """\
--- a/model.py
+++ b/model.py
@@ -28,4 +28,4 @@
 class Unit(nn.Module):
     def forward(self, x: Tensor) -> Tensor:
         # <b>one</b> row each
-        return x / x.norm(dim=-1, keepdim=True)
+        return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)
"""


def nan_produced() -> Report:
    """A module divides each row by its norm, which is zero for one of them."""
    made = _spoilt(_read("output", "output", 1e-3, 0.96), nans=128, first=(2, 0))
    frames = (
        _linear(4, "decoder.query", 1.5, 3.5),
        Frame(4, "decoder.unit", "Unit", (_read("input[0]", "input", 0.0, 3.5), made)),
    )
    given = _read("operand[0]", "input", 0.0, 3.5)._replace(health=_with_zeros(3.5, 128, 512))
    norms = _read("operand[1]", "input", 0.0, 12.0, shape=(4, 1))._replace(health=_with_zeros(12.0, 1, 4))
    return _failed(
        frames,
        4,
        find(frames, num_frames=2),
        extent="1 of 4 rows, row 2",
        operation="aten.div.Tensor",
        place=Place("/home/user/model.py", 31),
        transient=False,
        operands=(given, norms),
        cures=(
            Cure(
                "keep the divisor above zero, at model.py:31",
                True,
                patch=_PATCH,
                effect="changes no value that was finite",
                code="return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)",
            ),
            Cure("give the optimizer a smaller step", True, code="lr = 1e-3"),
        ),
    )


def backward_nan() -> Report:
    """The derivative of a root is inf at zero, and what came before the root multiplies it by zero."""
    bad = _spoilt(_read("output.grad", "gradient", 0.0, 0.5), nans=2, first=(0, 3))
    ones = _read("output.grad", "gradient", 1.0, 1.0)
    given, made = _read("input[0]", "input", 1e-3, 1.0), _read("output", "output", 0.0, 0.75)
    of_weight = _spoilt(_read("weight.grad", "gradient", 0.0, 1.0, shape=SQUARE), nans=256, first=(3, 0))
    frames = (
        _linear(3, "project", 1.0, 0.5625),
        Frame(3, "", "Model", (given, made)),
        Frame(3, "", "Model", (ones,), "backward"),
        Frame(3, "project", "Linear", (bad, of_weight), "backward"),
    )
    return _failed(
        frames,
        3,
        find(frames, num_frames=4),
        origin="received",
        source_module="",
        extent="scattered in the block [:3, 3:8]",
        operation="SqrtBackward0",
        place=Place("/home/user/model.py", 11),
        made="inf",
        operands=(_read("gradient[0]", "gradient", 1.0, 1.0), _read("result", "gradient", 0.0, 0.75)),
        remarks=("the operation was found in a re-run of the call, from other gradients of the same size",),
    )


def excused() -> Report:
    """Values that are not finite and no fault, values that nobody could read, and a step that was skipped."""
    mask = _spoilt(_read("input[1]", "input", 0.0, 0.0, note=Note("mask")), neginfs=96, first=(0, 1))
    allowed = _spoilt(_read("output", "output", 0.25, 4.0, note=Note("allowed")), infs=1)
    skipped = _spoilt(
        _read(
            "weight.grad", "gradient", 0.5, 64.0, "float16", note=Note("skipped_step", "scale 65536 → 32768")
        ),
        infs=3,
    )
    frames = (
        Frame(
            5,
            "attention",
            "Attention",
            (
                _read("input[0]", "input", 2e-2, 3.5),
                mask,
                unread("input[2]", "absent"),
                unread("input[3]", "not_a_tensor"),
                unread("input[4]", "not_checked", "meta tensor, no data", (2,), "float32"),
                allowed,
            ),
        ),
        Frame(5, "attention", "Attention", (_read("output", "output", 0.1, 1.0),), recomputed=True),
        Frame(5, "head", "Linear", (skipped,), "backward"),
    )
    return Report(frames, None, 5)


REPORTS = {make.__name__: make for make in (nan_produced, backward_nan, excused)}


@pytest.mark.parametrize("name", REPORTS)
def test_text(name: str, golden: Callable[[str, str], None]) -> None:
    """Without colours; the document is read back as the report that it was made from."""
    report = REPORTS[name]()
    golden(f"{name}.txt", report.to_text() + "\n")
    assert Report.from_json(report.to_json()) == report
