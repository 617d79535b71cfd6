"""The JSON document of a merge: it has every rank, and stays small."""

from __future__ import annotations

import json
import statistics
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanwatch import __main__ as command
from nanwatch.distributed.merge import Digest
from nanwatch.distributed.merge_pages import MOST_RANKS, document, merged_text, spell_ranks
from support.merges import NAMES, digests, merged_of, report
from support.sightings import finding


@given(digests())
def test_a_summary_is_that_of_the_numbers(found: list[Digest]) -> None:
    """Against statistics of the plain list; an outlying rank is one far from the median, by its own definition."""
    merged = merged_of(found)
    for name in NAMES:
        seen = {one.rank: one.headroom[name] for one in merged.digests if name in one.headroom}
        if not seen:
            with pytest.raises(KeyError):
                merged.summary(name)
            continue
        summary = merged.summary(name)
        middle = sorted(seen.values())[(len(seen) - 1) // 2]
        assert (summary.least, summary.median, summary.most) == (
            min(seen.values()),
            middle,
            max(seen.values()),
        )
        assert seen[summary.least_rank] == summary.least
        assert seen[summary.most_rank] == summary.most
        assert (summary.num_ranks, summary.num_nonfinite) == (len(seen), list(seen.values()).count(-inf))
        spread = max(seen.values()) - min(seen.values())
        assert summary.spread == (None if len(seen) == 1 or isnan(spread) else spread)
        away = {rank: 0.0 if bits == middle else abs(bits - middle) for rank, bits in seen.items()}
        limit = max(1.0, 4 * statistics.median_low(away.values()))
        far = {rank for rank, distance in away.items() if distance > limit}
        assert summary.num_outlying == len(far)
        assert {rank for rank, _ in summary.outlying} <= far
        assert len(summary.outlying) == min(8, len(far))
        named = [away[rank] for rank, _ in summary.outlying]
        assert named == sorted(away[rank] for rank in far)[::-1][: len(named)]


@given(digests())
def test_the_origin_is_the_earliest(found: list[Digest]) -> None:
    """By batch, then by place in it, what a call was given before what it made; all of that place and kind."""
    merged = merged_of(found)
    when = {
        one.rank: (one.finding.batch, one.finding.sequence, one.finding.origin == "produced", one.rank)
        for one in found
        if one.finding is not None
    }
    assert [one.rank for one in merged.failed] == sorted(when, key=lambda rank: when[rank])
    if not when:
        assert merged.origins == []
        return
    first = merged.failed[0].finding
    assert first is not None
    alike = [
        one.rank
        for one in merged.failed
        if one.finding is not None
        and (one.finding.batch, one.finding.sequence, one.finding.origin)
        == (first.batch, first.sequence, first.origin)
    ]
    assert [one.rank for one in merged.origins] == sorted(alike)


def many(number: int, low: int) -> list[Digest]:
    """Healthy ranks, of which one has little room."""
    return [Digest.of(report(rank, low=low)) for rank in range(number)]


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.mark.parametrize("number", [1000, pytest.param(16_384, marks=pytest.mark.slow)])
def test_many_ranks_make_a_small_document_and_a_short_text(number: int) -> None:
    """Summaries in place of columns; the rank with little room is named; a replica that came apart too."""
    found = many(number, low=777)
    place = next(place for place in found[5].weights if place.label == "bias")
    found[5].weights[place] = (1e-4, 0.125)
    merged = merged_of(found)
    made = plain(document(merged))
    assert made["headroom_bits"] is made["weights"] is None
    assert len(made["ranks"]) == number
    assert {(one["num_outlying"], one["outlying"][0]["rank"]) for one in made["headroom"]} == {(1, 777)}
    (different,) = made["differences"]
    assert [one["ranks"] for one in different["ranges"]] == [[r for r in range(number) if r != 5], [5]]
    assert len(json.dumps(made)) < 20_000 + 20 * number
    text = merged_text(merged)
    assert text.splitlines()[0] == f"{number} ranks: 0 to {number - 1}"
    assert "777 (7.0)" in text
    assert "on rank 0 to 4, 6 to" in text
    assert len(text) < 8000


def test_many_findings_are_cut_and_counted() -> None:
    """All ranks failed at one place: the document names all of them and holds the first findings."""
    found = [Digest(rank, finding("weight", 3, rank=rank), {}, {}) for rank in range(1000)]
    made = plain(document(merged_of(found)))
    assert (made["num_failed"], len(made["findings"]), len(made["origins"])) == (1000, MOST_RANKS, MOST_RANKS)
    assert made["origin_ranks"] == list(range(1000))
    text = merged_text(merged_of(found))
    assert "First: 984 ranks more at the same place: 16 to 999" in text
    assert len(text) < 4000


def test_the_command_takes_folders_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All at once, each rank once."""
    for rank in range(4):
        place = tmp_path / "run" / f"batch-7-rank-{rank}"
        place.mkdir(parents=True)
        (place / "report.json").write_text(report(rank).to_json())
    (tmp_path / "one.json").write_text(report(9).to_json())
    assert command.main(["merge", str(tmp_path / "one.json"), str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("5 ranks: 0, 1, 2, 3, 9\nAll finite\n")


@given(st.sets(st.integers(0, 60)))
def test_ranks_spelt_as_spans_are_all_there(ranks: set[int]) -> None:
    """Read back from the words, with what is only counted."""
    words, _, more = spell_ranks(sorted(ranks)).partition(" and ")
    read: list[int] = []
    for part in filter(None, words.split(", ")):
        first, _, last = part.partition(" to ")
        read += range(int(first), int(last or first) + 1)
    assert read == sorted(ranks)[: len(read)]
    assert len(read) + int(more.removesuffix(" more") or 0) == len(ranks)


def test_numbers_of_a_document_are_json() -> None:
    """Every float is finite or in quotes."""
    made = document(merged_of([Digest.of(report(0)), Digest(1, None, {"a": -inf, "b": inf}, {})]))

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for one in value.values():
                walk(one)
        elif isinstance(value, list):
            for one in value:
                walk(one)
        elif isinstance(value, float):
            assert isfinite(value)

    walk(made)
    assert made["headroom_bits"]["a"] == [None, "-inf"]
