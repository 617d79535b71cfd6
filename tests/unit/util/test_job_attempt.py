"""attempt: which start of an elastic job this is, in a report and in the keys of a store."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nanwatch import Report, watch
from nanwatch.util.job import Attempt, store_key
from support.merges import ATTEMPTS

# The variables that torchrun of torch 2.13 sets, with a store of the launcher and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
KEPT = {
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "40437",
}
NEW = {**KEPT, "TORCHELASTIC_USE_AGENT_STORE": "False"}


def test_what_torchrun_says() -> None:
    """The run, the restarts, and the place of the store where each attempt has a new one."""
    assert Attempt.of(KEPT, 5.0) == Attempt("job7", 1, "", 5.0)
    assert Attempt.of(NEW, 5.0) == Attempt("job7", 1, "node1:40437", 5.0)


@pytest.mark.parametrize("number", [None, "", "one", "-1", "1.5", "²", "9" * 5000])
def test_without_a_count_there_is_no_attempt(number: str | None) -> None:
    """Any value of the variable that is no count gives no attempt."""
    given = {**KEPT, "TORCHELASTIC_RESTART_COUNT": number}
    assert Attempt.of({name: value for name, value in given.items() if value is not None}, 0.0) is None


def test_launchers_that_count_differently_are_of_one_attempt() -> None:
    """After a restart the launcher whose process failed says 1 and the other 0; the next attempt has another store."""
    other = {**NEW, "TORCHELASTIC_RESTART_COUNT": "0"}
    after = {**NEW, "MASTER_PORT": "40438"}
    keys = [one.key for env in (NEW, other, after) if (one := Attempt.of(env, 0.0)) is not None]
    assert keys[0] == keys[1] != keys[2]
    assert store_key(NEW) == store_key(other) != store_key(after)


def test_in_a_store_that_is_kept_the_restarts_tell_attempts_apart() -> None:
    """And runs; without torchrun there is one attempt."""
    keys = [
        KEPT,
        {**KEPT, "TORCHELASTIC_RESTART_COUNT": "0"},
        {**KEPT, "TORCHELASTIC_RUN_ID": "job8"},
        {},
    ]
    assert len({store_key(one) for one in keys}) == 4
    assert store_key(KEPT) == "job7/1"


def test_its_words() -> None:
    """In UTC, whatever the clock on the wall says."""
    assert str(Attempt("job7", 2, "", 86_399.9)) == "attempt 2 of run job7, begun 1970-01-01 23:59:59 UTC"


def test_a_report_has_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in a forward and one in a backward have the attempt; without torchrun there is none."""

    def reports() -> list[Report]:
        found = []
        for data, gradients in ((float("nan"), False), (1.0, True)):
            model = nn.Linear(1, 1)
            with watch(model, on_nonfinite="record", gradients=gradients) as seen:
                y = model(torch.full((1, 1), data))
                if gradients:
                    (y * float("inf")).sum().backward()
                found.append(seen.report())
        return found

    for name in KEPT:
        monkeypatch.delenv(name, raising=False)
    assert [one.attempt for one in reports()] == [None, None]
    for name, value in KEPT.items():
        monkeypatch.setenv(name, value)
    for report in reports():
        assert report.finding is not None
        assert report.attempt is not None
        assert report.attempt.key == ("job7", 1)
        assert Report.from_json(report.to_json()).attempt == report.attempt


@given(st.one_of(st.none(), ATTEMPTS))
def test_a_report_is_read_back_with_it(attempt: Attempt | None) -> None:
    """To the last bit; a document of before has none."""
    report = Report((), None, None, attempt=attempt)
    assert Report.from_json(report.to_json()) == report
    document = json.loads(report.to_json())
    del document["attempt"]
    assert Report.from_json(json.dumps(document)) == replace(report, attempt=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"number": "1"}, "report.attempt.number should be an integer"),
        ({"run_id": None}, "report.attempt.run_id should be a string"),
        ({"begun": "nan"}, "report.attempt.begun should be seconds since 1970"),
        ({"begun": -1.0}, "report.attempt.begun should be seconds since 1970"),
        ({"begun": 1e300}, "report.attempt.begun should be seconds since 1970"),
        ({"more": 1}, "which this version does not know"),
    ],
)
def test_what_is_no_attempt_is_refused(changes: dict[str, Any], words: str) -> None:
    """With the place in the document; what is read can always be spelt."""
    document = json.loads(Report((), None, None, attempt=Attempt("job7", 1, "", 0.0)).to_json())
    document["attempt"] |= changes
    with pytest.raises(ValueError, match=words):
        Report.from_json(json.dumps(document))
