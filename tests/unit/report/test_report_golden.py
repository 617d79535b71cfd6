"""Text of a report without a failure is that in tests/golden. The docs have those of failures, whose commands run."""

from collections.abc import Callable
from math import inf

from nanwatch.numerics.formats import TensorHealth
from nanwatch.records.record import Frame, Note, Record, Role
from nanwatch.report.report import Report
from support.html_page import unread


def finite(label: str, role: Role, low: float, high: float, dtype: str = "float32") -> Record:
    return Record(label, role, (4, 128), dtype, low, high, True, None)


def infinite(plain: Record, note: Note, *, infs: int = 0, neginfs: int = 0) -> Record:
    """The same record with so many infinities among its elements."""
    health = TensorHealth(plain.abs_min, inf, False, *plain[4:6], 0, infs, neginfs, 0, 0, 512, (0, 1))
    return plain._replace(abs_max=inf, isfinite=False, health=health, note=note)


def test_text_of_what_is_excused(golden: Callable[[str, str], None]) -> None:
    """Values that are not finite and no fault, values that nobody could read, and a step that was skipped."""
    skip = Note("skipped_step", "scale 65536 → 32768")
    attention = (
        finite("input[0]", "input", 2e-2, 3.5),
        infinite(finite("input[1]", "input", 0.0, 0.0), Note("mask"), neginfs=96),
        unread("input[2]", "absent"),
        unread("input[3]", "not_a_tensor"),
        unread("input[4]", "not_checked", "meta tensor, no data", (2,), "float32"),
        infinite(finite("output", "output", 0.25, 4.0), Note("allowed"), infs=1),
    )
    gradient = infinite(finite("weight.grad", "gradient", 0.5, 64.0, "float16"), skip, infs=3)
    frames = (
        Frame(5, "attention", "Attention", attention),
        Frame(5, "attention", "Attention", (finite("output", "output", 0.1, 1.0),), recomputed=True),
        Frame(5, "head", "Linear", (gradient,), "backward"),
    )
    golden("excused.txt", Report(frames, None, 5).to_text() + "\n")
