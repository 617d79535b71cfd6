"""What nanwatch says of small programs of ordinary shape, held as it is: a count here may only rise.

Each program has the truth beside it, written by hand. MISSES lists what is not reached yet, by column of `judge.py`:
who reaches one takes it out.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import pytest

from support.paths import TESTS
from support.processes import environment, forked

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the judge forks its programs")

# How many programs have the column. A program that goes takes its number along, and says why in its commit.
COUNTS = {
    "module": 24, "operation": 24, "line": 18, "cure": 21, "sound": 18, "quiet": 9, "audit": 3,
}  # fmt: skip
MISSES = {
    "module": {"scores_that_overflow", "mse_missing_targets"},
    "operation": {"poisoned_running_mean", "scores_that_overflow", "causal_sign"},
    "line": {"scores_that_overflow", "causal_sign"},
    "cure": {
        # Nothing works, or no statement of the program would.
        "own_input", "negative_running_var", "given_to_a_nested_container", "scores_that_overflow",
    },
}  # fmt: skip

# The trainings of public threads.
THREAD_COUNTS = {"line": 60, "cure": 60, "sound": 60}
THREAD_MISSES = {
    "line": {"blank_image"},  # made before the model is called
    # Data; an inverse of a scale that has underflowed; an action that is scaled too early, which no guard cures; a
    # softmax in one statement that underflows in the next, which no row of the table spans.
    "cure": {"blank_image", "flow_reverse", "squashed_policy", "contig_depths", "reference_divergence"},
}


@functools.cache
def verdicts(*arguments: str) -> dict[str, dict[str, Any]]:
    """Judge all programs, each in a fork of one process."""
    judge = str(TESTS / "programs" / "judge.py")
    done = forked(judge, "--json", *arguments, env=environment(OMP_NUM_THREADS="1"), timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(column: str, counts: dict[str, int], misses: dict[str, set[str]], *arguments: str) -> None:
    judged = verdicts(*arguments)
    failed = {name: verdict["text"] for name, verdict in judged.items() if len(verdict) == 1}
    assert not failed
    values = {name: verdict[column] for name, verdict in judged.items() if column in verdict}
    assert len(values) == counts[column]
    missed, known = {name for name, value in values.items() if not value}, misses.get(column, set())
    texts = [f"{name}: {judged[name]['text']}" for name in sorted(missed - known)]
    assert not texts, "\n\n".join(texts)
    assert known == missed, "these are reached now: take them out of MISSES"


@pytest.mark.parametrize("column", COUNTS)
def test_programs(column: str) -> None:
    """Nothing is missed that was not missed before, and nothing is listed as missed that is reached."""
    check(column, COUNTS, MISSES)


@pytest.mark.slow
@pytest.mark.parametrize("column", THREAD_COUNTS)
def test_threads(column: str) -> None:
    """The same of the trainings of public threads."""
    check(column, THREAD_COUNTS, THREAD_MISSES, "--threads")
