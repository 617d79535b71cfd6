"""Result of `compare`: an output without a number, and the map of errors by token."""

from __future__ import annotations

import math
import random
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from nanwatch.equivalence import comparison
from nanwatch.equivalence.comparison import Comparison, ModuleError
from nanwatch.report.page import HeatMap


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
    with mock.patch.multiple(comparison, _ROWS=most_rows, _COLUMNS=most_columns):
        sections = comparison._tokens(modules)
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
