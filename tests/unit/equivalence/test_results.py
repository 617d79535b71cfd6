"""Results of `twice`, `bisect` and `compare`: the text of rare outcomes, and the map of errors by token."""

from __future__ import annotations

import math
import random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanwatch.equivalence import results
from nanwatch.equivalence.results import (
    Bisection,
    Comparison,
    FirstDifference,
    ModuleError,
    Repetition,
    Tried,
)
from nanwatch.report.page import HeatMap
from nanwatch.util.place import Place

FIRST = FirstDifference(
    batch=3, kind="input", module="fc", class_name="Linear", label="input[0]", form="float32 [2]", equal_before=0
)  # fmt: skip
SHORTER = FirstDifference(
    batch=0, kind="result", module="", class_name="", label="loss", form="float32 []", equal_before=1200,
    other="nothing", operation="aten.mm.default", operation_module="fc", place=Place("train.py", 3), code="x @ w",
    in_backward=True, cause="it is another one",
)  # fmt: skip
RAISED = Bisection(
    changed_by="torch.compile", module="fc", class_name="Linear", label="output", error=0.0, floor=0.0,
    reference="float64", raised="RuntimeError: no kernel", switches=1, runs=3,
)  # fmt: skip
BITS = Bisection(
    changed_by="autocast", module="", class_name="", label="output", error=1e-3, floor=0.0, reference="bits",
    raised="", switches=6, runs=9,
)  # fmt: skip
TRIED = (
    Tried("torch.set_num_threads(1)", "differ", "`loss`"),
    Tried("PYTHONHASHSEED=0", "failed", "KeyError: 'x'"),
)

TEXTS: dict[str, tuple[Repetition | Bisection, list[str], list[str]]] = {
    "the first tensor of all": (
        Repetition("train.py", 2, 4, 10, FIRST),
        [
            "Not repeatable: the runs of train.py part in batch 3.",
            "First:      `input[0]` of fc (Linear), float32 [2], the first of all",
        ],
        ["where the other run", "Operation:", "Tried"],
    ),
    "another run has another tensor": (
        Repetition("train.py", 2, 4, 10, SHORTER, TRIED),
        [
            "First:      `loss` of the step, float32 [], after 1,200 equal ones",
            "            where the other run has nothing",
            "Operation:  aten.mm.default of fc, in the backward of train.py:3",
            "                x @ w",
            "Cause:      it is another one",
            "  differ     torch.set_num_threads(1)",
            "  failed     PYTHONHASHSEED=0: KeyError: 'x'",
        ],
        [],
    ),
    "a run that ends by an exception": (
        RAISED,
        [
            "Changed by: torch.compile (1 switch, 3 runs)",
            "            which ends the run by RuntimeError: no kernel",
        ],
        ["Largest:"],
    ),
    "bits against bits": (
        BITS,
        [
            "Changed by: autocast (6 switches, 9 runs)",
            "Largest:    `output`, relative difference 1.0e-03 from the run without any",
        ],
        ["Look at:", "which ends the run"],
    ),
}


@pytest.mark.parametrize(("found", "told", "absent"), TEXTS.values(), ids=TEXTS)
def test_the_text_has_these_lines(found: Repetition | Bisection, told: list[str], absent: list[str]) -> None:
    text = found.to_text()
    assert [line for line in told if line not in text.splitlines()] == []
    assert [words for words in absent if words in text] == []


def test_an_output_that_cannot_be_compared_has_no_number() -> None:
    """Neither an error nor a limit is shown for outputs of different shapes."""
    one = ModuleError("fc", "fc", "Linear", "Linear", 0.0, None, 0.1)
    found = Comparison(False, one, "", (), "", "a second run", 8.0, 1, 1, (one,))
    (line,) = (line for line in found.to_text().splitlines() if line.startswith("Output:"))
    assert line == "Output:     not comparable"


@given(
    st.lists(st.sampled_from([0, 3, 7]), max_size=12),
    st.integers(1, 5),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_a_cell_of_the_map_has_the_largest_error_in_it(
    lengths: list[int], most_rows: int, most_columns: int, drawer: random.Random
) -> None:
    """The map has the modules of the commonest number of tokens, and each of their errors is in one cell."""
    modules = [
        ModuleError(f"m{i}", f"m{i}", "A", "A", 0.0, 0.0, 0.0, tuple(drawer.random() for _ in range(length)))
        for i, length in enumerate(lengths)
    ]
    with mock.patch.multiple(results, _ROWS=most_rows, _COLUMNS=most_columns):
        sections = results._tokens(modules)
    counts = {length: lengths.count(length) for length in lengths if length}
    if not counts:
        assert sections == []
        return
    (drawn,) = sections
    assert isinstance(drawn, HeatMap)
    # The first in the order of calls, where two numbers of tokens are as common.
    shown = max(counts, key=lambda length: counts[length])
    held = [one for one in modules if len(one.tokens) == shown]
    per_row = math.ceil(len(held) / most_rows)
    per_column = math.ceil(shown / most_columns)
    assert drawn.first == list(range(0, shown, per_column))
    assert drawn.last == [min(start + per_column, shown) - 1 for start in drawn.first]
    assert drawn.magnitudes is not None
    assert len(drawn.magnitudes) == math.ceil(len(held) / per_row) <= most_rows
    for i, row in enumerate(drawn.magnitudes.tolist()):
        merged = held[i * per_row : (i + 1) * per_row]
        for start, error in zip(drawn.first, row, strict=True):
            assert error == max(max(one.tokens[start : start + per_column]) for one in merged)
        worst = max(merged, key=lambda one: max(one.tokens))
        assert drawn.rows[i] == f"{worst.module_a} (A)"
