"""Results of `twice`: the text of rare outcomes."""

from __future__ import annotations

import pytest

from nanwatch.equivalence.results import FirstDifference, Repetition, Tried
from nanwatch.util.place import Place

FIRST = FirstDifference(
    batch=3, kind="input", module="fc", class_name="Linear", label="input[0]", form="float32 [2]", equal_before=0
)  # fmt: skip
SHORTER = FirstDifference(
    batch=0, kind="result", module="", class_name="", label="loss", form="float32 []", equal_before=1200,
    other="nothing", operation="aten.mm.default", operation_module="fc", place=Place("train.py", 3), code="x @ w",
    in_backward=True, cause="it is another one",
)  # fmt: skip
TRIED = (
    Tried("torch.set_num_threads(1)", "differ", "`loss`"),
    Tried("PYTHONHASHSEED=0", "failed", "KeyError: 'x'"),
)

TEXTS: dict[str, tuple[Repetition, list[str], list[str]]] = {
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
}


@pytest.mark.parametrize(("found", "told", "absent"), TEXTS.values(), ids=TEXTS)
def test_the_text_has_these_lines(found: Repetition, told: list[str], absent: list[str]) -> None:
    text = found.to_text()
    assert [line for line in told if line not in text.splitlines()] == []
    assert [words for words in absent if words in text] == []
