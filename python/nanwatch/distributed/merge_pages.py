"""Text, HTML page and JSON document of a merge: origin, weights that differ, headroom by rank.

The map of the page is a table whose cells are coloured by its style, without a script. Names come from a user's model,
and jinja2 escapes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil, inf
from typing import Any

from ..report import text
from ..report.html import LOW_BITS, NEAR_BITS, WIDEST_BAR, bits_words, level_of, still_page
from ..util.job import spell_runs
from ..util.reading import plain
from ..util.visible import module_name, visible
from .merge import Digest, Merged, ModuleHeadroom, WeightRanges

_WORST = 20  # modules and weights shown; the document has all
_MOST_RANKS = 16  # named one by one
_RANGES = 4  # of a weight that differs


def merged_text(merged: Merged) -> str:
    """Return the merge as text, without a newline at its end."""
    return "\n".join(map(visible, _lines(merged)))


def spell_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks (ascending) in words: "0, 2, 5", or of more than 16 "0 to 62, 64 to 127"."""
    if len(ranks) <= _MOST_RANKS:
        return ", ".join(map(str, ranks))
    return spell_runs(ranks, to=" to ")


def count_ranks(number: int) -> str:
    """Return the number with its noun."""
    return f"{number} rank" if number == 1 else f"{number} ranks"


def spell_bits(bits: float | None) -> str:
    """Return a number of bits in words, or "" for None."""
    return "" if bits is None else f"{bits:.1f}"


def finding_summary(digest: Digest) -> str:
    """Return the finding of a rank in one line that ends with its number; "" without a finding."""
    if digest.finding is None:
        return ""
    finding = replace(digest.finding, rank=0)  # the summary names only other ranks
    return f"{text.summary(finding)}, rank {digest.rank}"


def other_summary(merged: Merged) -> str:
    """Return an attempt that was not merged in a line: which one, how many ranks, and where it failed."""
    who = f"{merged.attempt or 'reports that name no attempt'}, {count_ranks(len(merged.digests))}"
    first = merged.origins
    if not first:
        return f"{who}: without a finding"
    more = f" and {count_ranks(len(first) - 1)} more at the same place" if len(first) > 1 else ""
    return f"{who}: {finding_summary(first[0])}{more}"


def _lines(merged: Merged) -> Iterable[str]:
    ranks = merged.ranks
    yield f"{count_ranks(len(ranks))}: {spell_ranks(ranks)}"
    if merged.attempt is not None:
        yield f"Of {merged.attempt}"
    first, failed = merged.origins, merged.failed
    named = {one.rank for one in first}
    yield from _finding_lines("First", first, "at the same place")
    yield from _finding_lines("Later", [one for one in failed if one.rank not in named], "with a finding")
    if not failed:
        yield "All finite"
    for one in merged.others[-_WORST:]:
        yield f"Not merged: {other_summary(one)}"
    if len(merged.others) > _WORST:
        yield f"Not merged: {len(merged.others) - _WORST} attempts before these"
    yield from _difference_lines(merged.differences())
    yield ""
    modules = merged.modules()
    if len(ranks) <= _MOST_RANKS:
        yield from _table_lines(merged, modules, ranks)
    else:
        yield from _summary_lines([merged.summary(name) for name in modules[:_WORST]])
    if len(modules) > _WORST:
        yield f"and {len(modules) - _WORST} more modules"
    for why in merged.left_out[:_WORST]:
        yield f"Left out: {why}"
    if len(merged.left_out) > _WORST:
        yield f"Left out: {len(merged.left_out) - _WORST} more files"


def _finding_lines(word: str, found: Sequence[Digest], what: str) -> Iterable[str]:
    for one in found[:_MOST_RANKS]:
        yield f"{word}: {finding_summary(one)}"
    if rest := [one.rank for one in found[_MOST_RANKS:]]:
        yield f"{word}: {count_ranks(len(rest))} more {what}: {spell_ranks(sorted(rest))}"


def range_line(low: float, high: float, ranks: Sequence[int]) -> str:
    """Return one range of a weight, and the ranks that have it, in words."""
    return f"{low:.6e} to {high:.6e} on rank {spell_ranks(ranks)}"


def _difference_lines(found: Sequence[WeightRanges]) -> Iterable[str]:
    if not found:
        return
    yield ""
    yield f"Weights that are not alike on all ranks, first in batch {found[0].batch}: the replicas have come apart,"
    yield "or the ranks hold different parts of a model under the same names"
    for one in found[:_WORST]:
        listed = "; ".join(range_line(*part) for part in one.ranges[:_RANGES])
        more = f"; and {len(one.ranges) - _RANGES} more ranges" if len(one.ranges) > _RANGES else ""
        yield f"  batch {one.batch} {module_name(one.module)} {one.label}: {listed}{more}"
    if len(found) > _WORST:
        yield f"  and {len(found) - _WORST} more"


def _table_lines(merged: Merged, modules: Sequence[str], ranks: Sequence[int]) -> Iterable[str]:
    yield "Bits of headroom by rank, the worst module first; spread is the difference between ranks"
    shown = modules[:_WORST]
    width = _width(shown)
    yield f"{'module':<{width}} {'spread':>8} " + " ".join(f"{rank:>7}" for rank in ranks)
    for name in shown:
        cells = " ".join(f"{spell_bits(bits):>7}" for bits in merged.column(name))
        spread = spell_bits(merged.summary(name).spread)
        yield f"{module_name(name):<{width}} {spread:>8} {cells}".rstrip()


def _summary_lines(rows: Sequence[ModuleHeadroom]) -> Iterable[str]:
    yield "Bits of headroom over all ranks, the worst module first; spread is the difference between ranks"
    width = _width([row.module for row in rows])
    yield f"{'module':<{width}} {'spread':>8} {'least':>7} {'median':>7} {'most':>7} {'not finite':>10}  outlying ranks"
    for row in rows:
        cells = " ".join(f"{spell_bits(bits):>7}" for bits in (row.least, row.median, row.most))
        far = ", ".join(f"{rank} ({bits:.1f})" for rank, bits in row.outlying)
        more = (
            f" and {row.num_outlying - len(row.outlying)} more"
            if row.num_outlying > len(row.outlying)
            else ""
        )
        line = (
            f"{module_name(row.module):<{width}} {spell_bits(row.spread):>8} {cells} {row.num_nonfinite:>10}"
        )
        yield f"{line}  {far}{more}".rstrip()


def _width(names: Sequence[str]) -> int:
    return max((len(module_name(name)) for name in names), default=6)


_MAP_ROWS = 40  # modules: the rows of the map
_COLUMNS = 256  # with more ranks, a column is several of them
_WORDY = 32  # columns up to which a cell shows its number
_SHOWN = 20  # findings, weights, files
_PALEST = 20  # percent of the colour that is left at the widest headroom


def merged_html(merged: Merged) -> str:
    """Return the merge as one HTML document, to be written as UTF-8. Raises ImportError without jinja2."""
    modules = merged.modules()
    per_column = ceil(len(merged.digests) / _COLUMNS)
    groups = [merged.ranks[i : i + per_column] for i in range(0, len(merged.digests), per_column)]
    first = merged.origins
    named = {one.rank for one in first}
    return still_page(
        "merge",
        "merge --html",
        merged=merged,
        headline=_headline(merged),
        attempt=str(merged.attempt or ""),
        others=[other_summary(one) for one in merged.others],
        first=first,
        later=[one for one in merged.failed if one.rank not in named],
        rows=[
            {"name": module_name(name), "cells": _cells(merged.column(name), groups)}
            for name in modules[:_MAP_ROWS]
        ],
        heads=_heads(groups),
        is_binned=per_column > 1,
        per_column=per_column,
        num_modules=len(modules),
        cells_have_words=len(groups) <= _WORDY,
        summaries=[merged.summary(name) for name in modules[:_MAP_ROWS]],
        differences=merged.differences(),
        near_bits=NEAR_BITS,
        low_bits=LOW_BITS,
        shown=_SHOWN,
        module_name=module_name,
        number=_number,
        spread=spell_bits,
        range_line=range_line,
        finding_summary=finding_summary,
        count_ranks=count_ranks,
        spell_ranks=spell_ranks,
    )


def _headline(merged: Merged) -> str:
    first = merged.origins
    if not first:
        return f"All finite on {count_ranks(len(merged.digests))}"
    finding = first[0].finding
    assert finding is not None
    where = f"{finding.value} first seen in {finding.label} of {module_name(finding.module)}"
    if len(first) == 1:
        return f"{where} on rank {first[0].rank}"
    return f"{where} on {count_ranks(len(first))} at once"


def _heads(groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the first rank of each column and the columns it spans, at most 8 where there is no room for all."""
    step = 1 if len(groups) <= _WORDY else ceil(len(groups) / 8)
    return [(groups[i][0], min(step, len(groups) - i)) for i in range(0, len(groups), step)]


def _cells(column: Sequence[float | None], groups: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    cells, at = [], 0
    for ranks in groups:
        seen = [
            (bits, rank)
            for bits, rank in zip(column[at : at + len(ranks)], ranks, strict=True)
            if bits is not None
        ]
        at += len(ranks)
        bits, rank = min(seen, default=(None, ranks[0]))
        of = (
            f"rank {rank}"
            if len(ranks) == 1 or not seen
            else f"ranks {ranks[0]} to {ranks[-1]}, least on rank {rank}"
        )
        cells.append(
            {
                "level": level_of(bits),
                "share": _share(bits),
                "title": f"{of}: {bits_words(bits) or 'no range'}",
                "words": _number(bits),
            }
        )
    return cells


def _share(bits: float | None) -> int | None:
    """Return the percentage of its colour that a cell keeps; None for all of it."""
    if bits is None or bits < LOW_BITS:
        return None
    room = (min(bits, WIDEST_BAR) - LOW_BITS) / (WIDEST_BAR - LOW_BITS)
    return round(100 - (100 - _PALEST) * room)


def _number(bits: float | None) -> str:
    return "none" if bits == -inf else "all zero" if bits == inf else spell_bits(bits)


SCHEMA = "nanwatch.merged"
VERSION = 1

# Up to this many ranks a document holds the values of each rank. Above it, only summaries, whose size hardly grows with
# the job.
MOST_RANKS = 256
_DOCUMENT_RANGES = 16  # of a weight that differs


def document(merged: Merged) -> dict[str, Any]:
    """Return the merge for programs, with nan and the infinities as strings, as in a report.

    `headroom_bits` and `weights` are null where there are more than 256 ranks, and `findings` and `origins` are the
    first 256; `num_failed` and `origin_ranks` are of all. `other_attempts` has a document of each.
    """
    modules, weights = merged.modules(), merged.weights()
    is_whole = len(merged.digests) <= MOST_RANKS
    failed, origins = merged.failed, merged.origins
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "attempt": plain(merged.attempt),
        "ranks": merged.ranks,
        "num_failed": len(failed),
        "origin_ranks": [one.rank for one in origins],
        "origins": [plain(one.finding) for one in origins[:MOST_RANKS]],
        "findings": [plain(one.finding) for one in failed[:MOST_RANKS]],
        "headroom": [plain(merged.summary(name)) for name in modules],
        "headroom_bits": {name: [plain(bits) for bits in merged.column(name)] for name in modules}
        if is_whole
        else None,
        "differences": [
            {**plain(replace(one, ranges=one.ranges[:_DOCUMENT_RANGES])), "num_ranges": len(one.ranges)}
            for one in weights
            if len(one.ranges) > 1
        ],
        "weights": [plain(one) for one in weights] if is_whole else None,
        "other_attempts": [document(one) for one in merged.others],
        "left_out": list(merged.left_out),
    }
