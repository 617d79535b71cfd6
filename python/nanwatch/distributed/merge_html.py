"""A merge as one page of HTML: who was first, a map of headroom by module and rank, weights that differ.

The map is a table whose cells are coloured by the style: the page has no script at all. Names come from a user's model;
jinja2 escapes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from ..report import text
from ..report.html import LOW_BITS, NEAR_BITS, WIDEST_BAR, bits_words, level_of, still_page
from .merge_text import (
    attempt_words,
    count_ranks,
    finding_summary,
    other_summary,
    range_line,
    spell_bits,
    spell_ranks,
)

if TYPE_CHECKING:
    from .merge import Merged

_WORST = 40  # modules: the rows of the map
_COLUMNS = 256  # with more ranks, a column is several of them
_WORDY = 32  # columns up to which a cell shows its number
_SHOWN = 20  # findings, weights, files
_PALEST = 20  # percent of the colour that is left at the widest headroom


def merged_html(merged: Merged) -> str:
    """The merge as one HTML document, to be written as UTF-8. Raises ImportError without jinja2."""
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
        attempt=attempt_words(merged),
        others=[other_summary(one) for one in merged.others],
        first=first,
        later=[one for one in merged.failed if one.rank not in named],
        rows=[
            {"name": text.module_name(name), "cells": _cells(merged.column(name), groups)}
            for name in modules[:_WORST]
        ],
        heads=_heads(groups),
        is_binned=per_column > 1,
        per_column=per_column,
        num_modules=len(modules),
        cells_have_words=len(groups) <= _WORDY,
        summaries=[merged.summary(name) for name in modules[:_WORST]],
        differences=merged.differences(),
        near_bits=NEAR_BITS,
        low_bits=LOW_BITS,
        shown=_SHOWN,
        module_name=text.module_name,
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
    where = f"{finding.value} first seen in {finding.label} of {text.module_name(finding.module)}"
    if len(first) == 1:
        return f"{where} on rank {first[0].rank}"
    return f"{where} on {count_ranks(len(first))} at once"


def _heads(groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The first rank of each column, or where there is no room for all of them, of so many columns."""
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
    """How much of its colour a cell keeps, in percent; None for all."""
    if bits is None or bits < LOW_BITS:
        return None
    room = (min(bits, WIDEST_BAR) - LOW_BITS) / (WIDEST_BAR - LOW_BITS)
    return round(100 - (100 - _PALEST) * room)


def _number(bits: float | None) -> str:
    return "none" if bits == -inf else "all zero" if bits == inf else spell_bits(bits)
