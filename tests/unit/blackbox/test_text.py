"""The sentences and the page of a black box."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanwatch.blackbox.story import BlackBoxReport, BoxBatch, BoxCall, BoxThread
from nanwatch.blackbox.text import box_html, box_text, ended_words, is_bad, seconds_words, where_words

CALL = BoxCall("layers.3.mlp", "MLP", 8214, 0.25)
REPORT = BlackBoxReport(
    path="a.blackbox",
    pid=7,
    rank=0,
    world_size=1,
    begun=0.0,
    latest=3661.0,
    end="signal",
    signal=9,
    signal_address=None,
    exit_status=None,
    kernel="",
    phase="forward",
    batch=8214,
    num_calls=1_234_567,
    seconds_after=3.1,
    threads=(
        BoxThread(8, (BoxCall("", "Net", 8214, 0.3), CALL)),
        BoxThread(9, (replace(CALL, module="x\x1b[2J"),)),
    ),
    raised=None,
    gradient=None,
    python=("train.py:3 in step",),
    python_ago=0.8,
    memory=3 << 29,
    calls=(replace(CALL, ago=3.1), replace(CALL, seconds=None, raised=True)),
    batches=(BoxBatch(8213, 0.5, False, 2.25, "head", "output", "float16"),),
    frames=(),
    pending=(),
    facts={"argv": ["python", "a b.py"], "host": "node7", "torch": "2.13.0"},
    notes=({"kind": "stall", "time": 1.0, "seconds": 300, "stacks": {"MainThread": ["train.py:3 in step"]}},),
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "signal 9 (SIGKILL) at 1970-01-01 01:01:01 UTC"),
        ({"signal": 11, "signal_address": 16}, "signal 11 (SIGSEGV) at address 0x10 at"),
        ({"end": "runs"}, "it runs"),
        (
            {"kernel": "Out of memory: 7"},
            "(SIGKILL) at 1970-01-01 01:01:01 UTC (the kernel says: Out of memory: 7)",
        ),
        ({"end": "exit"}, "Python ended by itself at"),
        ({"end": "exit", "exit_status": 3}, "Python ended by itself with exit status 3 at"),
        ({"end": "unknown"}, "SIGKILL, os._exit or a lost machine leave none"),
        (
            {"end": "unknown", "kernel": "Out of memory: Killed process 7"},
            "the kernel says: Out of memory: Killed",
        ),
        (
            {"end": "exception", "notes": ({"kind": "exception", "error": "ValueError: no\nmore"},)},
            "an exception ended Python at 1970-01-01 01:01:01 UTC: ValueError: no",
        ),
        ({"latest": 1e300}, "at ?"),
    ],
)
def test_the_end_is_a_sentence(changes: dict[str, object], words: str) -> None:
    """One for each way to end."""
    report = replace(REPORT, **changes)  # type: ignore[arg-type]
    assert words in ended_words(report)
    assert "more" not in ended_words(report)
    assert is_bad(report) == (report.end not in ("runs", "exit") or report.exit_status == 3)


def test_facts_of_a_note_are_read_as_words() -> None:
    """A dictionary is no text for people, nor are bytes."""
    tensors = [{"dtype": "float32", "count": 2, "bytes": 3 << 20}]
    assert "dtype float32, count 2, 3.0 MiB" in box_text(replace(REPORT, notes=({"tensors": tensors},)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "batch 8,214, forward: inside layers.3.mlp (MLP), which had run for 250 ms"),
        ({"threads": (), "phase": "step"}, "after batch 8,214, in the optimizer's step or after it"),
        (
            {"threads": (), "phase": "backward", "gradient": ("head", "weight")},
            "batch 8,214, backward: the latest gradient was of the weight of head",
        ),
        ({"threads": (), "phase": ""}, "after the forward of batch 8,214, outside of watched modules"),
        ({"threads": (), "phase": "", "batch": None}, "before the first call of a watched module"),
    ],
)
def test_the_place_is_a_sentence(changes: dict[str, object], words: str) -> None:
    """One for each phase."""
    assert where_words(replace(REPORT, **changes)) == words  # type: ignore[arg-type]


def test_the_text_has_all_that_is_known() -> None:
    """Without the control characters of a name."""
    text = box_text(REPORT)
    for words in (
        "7 on node7: python 'a b.py'",
        "3.1 s after its latest call ended",
        "the root module > layers.3.mlp",
        "9: batch 8,214, forward: inside x",
        "train.py:3 in step",
        "1.50 GiB",
        "of 1,234,567 calls",
        "layers.3.mlp (MLP) took 250 ms",
        "layers.3.mlp (MLP), raised",
        "batch 8,213 took 500 ms, least headroom 2.2 bits in head output, float16",
        "seconds: 300",
        "thread MainThread:",
    ):
        assert words in text
    assert "\x1b" not in text


def test_the_page_has_the_same() -> None:
    """Names are escaped."""
    page = box_html(replace(REPORT, calls=(replace(CALL, module="<script>"),)))
    assert "signal 9 (SIGKILL)" in page
    assert "head" in page
    assert "<script>," not in page
    assert "&lt;script&gt;" in page or "\\u003cscript" in page


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, ""),
        (3.14159, "3.14 s"),
        (12345.6, "12,346 s"),
        (0.0125, "12.5 ms"),
        (4.5e-5, "45 µs"),
        (0.0, "0 µs"),
    ],
)
def test_times_have_a_unit(seconds: float | None, words: str) -> None:
    """That makes them short."""
    assert seconds_words(seconds) == words
