"""Lines of records and frames, and the sentence of a finding."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from nanwatch.numerics.formats import TensorHealth
from nanwatch.records.note import Note
from nanwatch.records.record import Frame, Phase, Record
from nanwatch.report.finding import Finding
from nanwatch.report.text import batch_lines, culprit, frame_lines, record_line, small_words, summary

PLAIN = Record("output", "output", (2, 2), "float16", 0.5, 6e4, True, None)
UNREAD = PLAIN._replace(abs_min=None, abs_max=None, isfinite=None)


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (PLAIN, "5.00e-01 6.00e+04 output"),
        (PLAIN._replace(abs_min=0.5, abs_max=inf, isfinite=False), "5.00e-01      inf output"),
        (PLAIN._replace(note=Note("mask")), "5.00e-01 6.00e+04 output (mask)"),
        (UNREAD._replace(note=Note("absent")), "             None output"),
        (UNREAD._replace(note=Note("not_checked", "meta")), "      not checked output (meta)"),
        (UNREAD._replace(note=Note("spike", "loss 9")), "                  output (loss 9)"),
        (PLAIN._replace(label="out\x1b[2J"), "5.00e-01 6.00e+04 out\\x1b[2J"),
    ],
)
def test_a_line_has_the_range_or_the_reason(record: Record, line: str) -> None:
    """Both columns are 17 characters wide; names from strangers drive no terminal."""
    assert record_line(record) == line


@pytest.mark.parametrize(
    ("phase", "recomputed", "words"),
    [("forward", False, ""), ("backward", False, " (backward)"), ("forward", True, " (recomputed)")],
)
def test_a_frame_says_what_kind_of_call_it_is(phase: Phase, recomputed: bool, words: str) -> None:
    """A forward is not mentioned."""
    title, line = frame_lines(Frame(0, "fc", "Linear", (PLAIN,), phase, recomputed))
    assert title == " " * 18 + f"fc Linear{words}"
    assert line == record_line(PLAIN)


def test_a_batch_begins_as_transformers_prints_it() -> None:
    """Two empty lines, the number, and the columns."""
    assert "\n".join(batch_lines(3)).split("\n") == [
        "", "", " " * 18 + "*** Starting batch number=3 ***", "abs min  abs max  metadata",
    ]  # fmt: skip


FINDING = Finding("", "Linear", "output", 3, 0, "inf", "produced", None, 1, 4, (1, 0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "inf first seen in `output` of the root module (Linear) in batch 3"),
        ({"rank": 2, "module": "fc"}, "inf first seen in `output` of fc (Linear) in batch 3 on rank 2"),
        (
            {"phase": "backward"},
            "inf first seen in `output` of the root module (Linear) in the backward of batch 3",
        ),
        ({"phase": "step"}, "`output` of the root module (Linear) in the optimizer's step after batch 3"),
    ],
)
def test_a_finding_is_one_sentence(changes: dict[str, object], words: str) -> None:
    assert summary(replace(FINDING, **changes)).endswith(words)


def test_the_culprit_is_the_first_fault_of_its_frame() -> None:
    """Of the frame with the name, the batch and the phase of the finding; nothing where that is gone."""
    bad = PLAIN._replace(abs_max=inf, isfinite=False)
    frames = [
        Frame(2, "", "Linear", (bad,)),
        Frame(3, "", "Linear", (PLAIN,)),
        Frame(3, "", "Linear", (PLAIN, bad)),
    ]
    assert culprit(FINDING, frames) == (frames[2], bad)
    assert culprit(FINDING, frames[:2]) == (None, None)
    assert culprit(replace(FINDING, label="input[0]"), frames) == (None, None)


def test_counts_are_told_where_there_are_any() -> None:
    """Of zeros and subnormals, with commas in thousands."""
    health = TensorHealth(0.0, 1.0, True, 0.0, 1.0, 0, 0, 0, 1200, 0, 4096, None)
    assert small_words(PLAIN._replace(health=health)) == ["1,200 zero"]
    assert small_words(PLAIN._replace(health=health._replace(num_subnormal=3))) == [
        "1,200 zero",
        "3 subnormal",
    ]
    assert small_words(PLAIN) == []
