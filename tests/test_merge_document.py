"""The JSON document of a merge: merged again it gives what one merge of all gives, and it stays small."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merges import NAMES, digests, merged_of, report, saved
from nanwatch import __main__ as command
from nanwatch.attempt import Attempt
from nanwatch.merge import by_attempt, merge
from nanwatch.merge_digest import Digest
from nanwatch.merge_document import MOST_RANKS, document
from nanwatch.merge_text import merged_text, spell_ranks
from sightings import finding


@given(digests(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_merge_of_merges_is_the_merge_of_all(
    found: list[Digest], groups: int, chance: random.Random
) -> None:
    """To the last bit, however the ranks are grouped."""
    shuffled = chance.sample(found, len(found))
    with tempfile.TemporaryDirectory() as folder:
        parts = [
            saved(Path(folder), f"{i}.json", part) for i in range(groups) if (part := shuffled[i::groups])
        ]
        again = merge(*parts)
    whole = merged_of(found)
    assert json.dumps(document(again)) == json.dumps(document(whole))
    assert merged_text(again) == merged_text(whole)


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


@given(st.lists(digests(), min_size=2, max_size=4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_attempts_go_through_documents(found: list[list[Digest]], groups: int, chance: random.Random) -> None:
    """Each node merges what it has of them, and then all are merged: as one merge of all reports, for each attempt."""
    every = [
        replace(digest, attempt=Attempt("job", number, "", 100.0 * number + digest.rank))
        for number, of_attempt in enumerate(found)
        for digest in of_attempt
    ]
    shuffled = chance.sample(every, len(every))
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        for i in range(groups):
            if part := by_attempt(shuffled[i::groups]):
                chosen = chance.randrange(len(part))
                whole = replace(part[chosen], others=(*part[:chosen], *part[chosen + 1 :]))
                parts.append(Path(folder, f"{i}.json"))
                parts[-1].write_text(json.dumps(document(whole), allow_nan=False))
        for number, of_attempt in enumerate(found):
            again = merge(*parts, attempt=str(number))
            begun = 100.0 * number + min(one.rank for one in of_attempt)
            assert again.attempt == Attempt("job", number, "", begun)
            assert {one.attempt.number for one in again.others if one.attempt is not None} == (
                set(range(len(found))) - {number}
            )
            told = document(replace(again, others=()))
            assert told.pop("attempt") == {"run_id": "job", "number": number, "master": "", "begun": begun}
            plain_one = document(merged_of(of_attempt))
            assert plain_one.pop("attempt") is None
            assert json.dumps(told) == json.dumps(plain_one)


def test_a_document_of_before_has_no_attempt(tmp_path: Path) -> None:
    """It is merged as it was."""
    made = document(merged_of([Digest.of(report(0))]))
    del made["attempt"], made["other_attempts"]
    (tmp_path / "old.json").write_text(json.dumps(made))
    assert merge(tmp_path / "old.json") == merged_of([Digest.of(report(0))])


def test_an_attempt_of_many_ranks_is_left_out_and_named(tmp_path: Path) -> None:
    """The world was larger before the restart: of that only summaries are in the document."""
    before = [replace(one, attempt=Attempt("job", 0, "", 0.0)) for one in many(MOST_RANKS + 1, low=-1)]
    after = [replace(one, attempt=Attempt("job", 1, "", 60.0)) for one in many(2, low=-1)]
    first, second = by_attempt([*before, *after])
    (tmp_path / "all.json").write_text(json.dumps(document(replace(second, others=(first,)))))
    merged = merge(tmp_path / "all.json")
    assert (merged.ranks, merged.others) == ([0, 1], ())
    (why,) = merged.left_out
    assert why.startswith("attempt 0 of run job, begun 1970-01-01 00:00:00 UTC: it is of 257 ranks")


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


def test_a_document_of_summaries_is_not_merged_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its columns are gone; the error says in which order to merge."""
    path = saved(tmp_path, "all.json", many(MOST_RANKS + 1, low=-1))
    assert command.main(["merge", str(path)]) == 2
    assert f"merge groups of up to {MOST_RANKS} ranks" in capsys.readouterr().err


def test_the_command_takes_folders_reports_and_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All at once, each rank once."""
    for rank in range(4):
        place = tmp_path / "run" / f"batch-7-rank-{rank}"
        place.mkdir(parents=True)
        (place / "report.json").write_text(report(rank).to_json())
    assert command.main(["merge", str(tmp_path / "run"), "--json"]) == 0
    (tmp_path / "first.json").write_text(capsys.readouterr().out)
    (tmp_path / "one.json").write_text(report(9).to_json())
    assert (
        command.main(
            ["merge", str(tmp_path / "first.json"), str(tmp_path / "one.json"), str(tmp_path / "run")]
        )
        == 0
    )
    assert capsys.readouterr().out.startswith("5 ranks: 0, 1, 2, 3, 9\nAll finite\n")


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda made: made.__setitem__(key, value)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_set("version", 2), "document.version should be one of 1"),
        (_set("ranks", [0, 0]), "its findings are not of its ranks"),
        (_set("ranks", ["0"]), "document.ranks[0] should be an integer"),
        (_set("headroom_bits", {"a": [1.0]}), "has 1 numbers for 2 ranks"),
        (_set("headroom_bits", {"a": ["nan", 1.0]}), "should be a number of bits"),
        (_set("more", 1), "which this version does not know"),
        (_set("attempt", {"number": 1}), "document.attempt has no 'run_id'"),
        (_set("other_attempts", [{}]), "document.other_attempts[0] has no 'schema'"),
        (_set("other_attempts", [[]]), "document.other_attempts[0] should be an object"),
        (_set("other_attempts", 1), "document.other_attempts should be a list"),
        (lambda made: made.pop("weights"), "has no 'weights'"),
        (lambda made: made["weights"][0]["ranges"][0]["ranks"].append(77), "names rank 77"),
    ],
)
def test_a_document_that_is_not_one_is_left_out_and_named(tmp_path: Path, spoil: Any, words: str) -> None:
    """Whoever wrote it: the place in it and what was expected; the others are merged."""
    made = document(merged_of([Digest.of(report(rank)) for rank in range(2)]))
    spoil(made)
    bad, good = tmp_path / "bad.json", saved(tmp_path, "good.json", [Digest.of(report(5))])
    bad.write_text(json.dumps(made))
    merged = merge(bad, good)
    assert merged.ranks == [5]
    (why,) = merged.left_out
    assert why.startswith(f"{bad}: not a merged report: ")
    assert words in why


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    """Without a stack overflow."""
    path = tmp_path / "deep.json"
    path.write_text('{"schema": "nanwatch.merged", "version": ' + "[" * 100_000)
    with pytest.raises(ValueError, match="not a merged report"):
        merge(path)


def test_what_was_left_out_stays_named(tmp_path: Path) -> None:
    """Through a second merge."""
    (tmp_path / "run" / "x").mkdir(parents=True)
    (tmp_path / "run" / "x" / "report.json").write_text("{}")
    (tmp_path / "one.json").write_text(report(0).to_json())
    made = document(merge(tmp_path / "run", tmp_path / "one.json"))
    (tmp_path / "merged.json").write_text(json.dumps(made))
    assert merge(tmp_path / "merged.json").left_out == tuple(made["left_out"]) != ()


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
