"""The finding: the first non-finite record, and whether its module made it; the earliest of several ranks."""

from math import inf, nan

import pytest

from nanwatch.numerics.formats import TensorHealth
from nanwatch.records.record import Note, Record
from nanwatch.report.finding import Cure, find, working_first
from nanwatch.report.finding_text import explain
from support.html_page import frame, record, unread


@pytest.mark.parametrize(
    ("bad", "origin", "value"),
    [
        (record("weight", "weight", nan), "weight", "nan"),
        (record("running_mean", "buffer", inf), "buffer", "inf"),
        (record("input[0]", "input", nan), "received", "nan"),
        (record("output", "output", inf), "produced", "inf"),
    ],
)
def test_origin_is_the_role_of_the_first_fault(bad: Record, origin: str, value: str) -> None:
    frames = (
        frame("a", record("input[0]", "input", nan, note=Note("mask")), record("output", "output")),
        frame("b", record("w", "weight"), bad, record("output", "output", nan)),
        frame("c", record("input[0]", "input", nan)),
    )
    finding = find(frames, caller="parent", rank=2)
    assert (finding.module, finding.label, finding.origin, finding.value) == ("b", bad.label, origin, value)
    assert (finding.num_nonfinite, finding.numel, finding.index, finding.rank) == (1, 4, (1, 0), 2)
    assert finding.source_module == ("parent" if origin == "received" else None)
    finding = find(frames[2:], batch_inputs=[record("input[x]", "input", nan)], caller="")
    assert (finding.origin, finding.source_module) == ("data", None)


def test_moderate_inputs_leave_a_running_statistic_finite() -> None:
    """Not in float16, which cannot hold the square of 256. Another buffer may be of what its module computes."""
    are_before = []
    for class_name, dtype in (("BatchNorm1d", "float32"), ("BatchNorm1d", "float16"), ("Average", "float32")):
        bad = record("running_var", "buffer", nan)._replace(dtype=dtype)
        call = frame("a", record("input[0]", "input"), bad)._replace(class_name=class_name)
        are_before.append("before this call" in str(explain(find([call]), call, bad, [call]).reason))
    assert are_before == [True, False, False]


def test_both_values_are_named() -> None:
    both = record("output", "output", nan)
    counted = both._replace(health=TensorHealth(0.5, nan, False, 0.5, 2.0, 1, 0, 1, 0, 0, 4, (1, 0)))
    assert find([frame("a", counted)]).value == "nan+inf"  # type: ignore[union-attr]
    uncounted = find([frame("a", both._replace(health=None))])
    assert (uncounted.value, uncounted.num_nonfinite, uncounted.numel) == ("nan", None, 4)


def test_masks_and_unread_tensors_are_no_findings() -> None:
    rows = record("input[0]", "input", inf, note=Note("mask")), unread("input[1]", "not_checked", "meta")
    assert find([frame("a", *rows)]) is None
    assert find([]) is None


def test_cures_that_work_come_first() -> None:
    no, almost = Cure("do nothing", False), Cure("widen", False, 0.5)
    works, also = Cure("use float32", True, 112.0), Cure("clamp", True)
    assert working_first([no, works, almost, also]) == (works, also, no, almost)
    assert [cure.verdict for cure in (works, almost, no)] == ["works", "not enough", "does not help"]
