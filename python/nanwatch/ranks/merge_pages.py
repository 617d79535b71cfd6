"""Text, HTML page and JSON document of a merge: origin, weights that differ, headroom by rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np

from ..report import text
from ..report.page import NUMBER, TEXT, HeatMap, Section, Table, headroom_cells, page
from ..util.job import spell_runs
from ..util.reading import plain
from ..util.visible import module_name, visible
from .merge import Digest, Merged, ModuleHeadroom, WeightRanges

_WORST = 20  # modules, weights, attempts and files shown; the document has all
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
    if not merged.failed:
        yield "All finite"
    yield from (f"{head}: {body}" for head, body in _facts(merged))
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


def _facts(merged: Merged) -> Iterable[tuple[str, str]]:
    """Yield the findings and the attempts that were not merged, for text and page."""
    named = {one.rank for one in merged.origins}
    later = [one for one in merged.failed if one.rank not in named]
    for head, digests, what in (
        ("First", merged.origins, "at the same place"),
        ("Later", later, "with a finding"),
    ):
        yield from ((head, finding_summary(one)) for one in digests[:_MOST_RANKS])
        if rest := [one.rank for one in digests[_MOST_RANKS:]]:
            yield head, f"{count_ranks(len(rest))} more {what}: {spell_ranks(sorted(rest))}"
    yield from (("Not merged", other_summary(one)) for one in merged.others[-_WORST:])
    if len(merged.others) > _WORST:
        yield "Not merged", f"{len(merged.others) - _WORST} attempts before these"


def range_line(low: float, high: float, ranks: Sequence[int]) -> str:
    """Return one range of a weight, and the ranks that have it, in words."""
    return f"{low:.6e} to {high:.6e} on rank {spell_ranks(ranks)}"


def _spell_ranges(one: WeightRanges) -> str:
    more = f"; and {len(one.ranges) - _RANGES} more ranges" if len(one.ranges) > _RANGES else ""
    return "; ".join(range_line(*part) for part in one.ranges[:_RANGES]) + more


def _difference_lines(found: Sequence[WeightRanges]) -> Iterable[str]:
    if not found:
        return
    yield ""
    yield f"Weights that are not alike on all ranks, first in batch {found[0].batch}: the replicas have come apart,"
    yield "or the ranks hold different parts of a model under the same names"
    for one in found[:_WORST]:
        yield f"  batch {one.batch} {module_name(one.module)} {one.label}: {_spell_ranges(one)}"
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
_COLUMNS = 1000  # with more ranks, a column is several of them


def merged_html(merged: Merged) -> str:
    """Return the merge as one HTML document, to be written as UTF-8. Raises ImportError without jinja2."""
    ranks = count_ranks(len(merged.digests))
    amount = f"{ranks}: {spell_ranks(merged.ranks)}" + (f" · {merged.attempt}" if merged.attempt else "")
    facts = list(_facts(merged))
    return page(
        "merge --html", _headline(merged), amount, facts, list(_sections(merged)), is_bad=bool(merged.failed)
    )


def _sections(merged: Merged) -> Iterable[Section]:
    modules = merged.modules()
    shown = modules[:_MAP_ROWS]
    if shown:
        bits = [[nan if one is None else one for one in merged.column(name)] for name in shown]
        rest = len(modules) - len(shown)
        ranks, per_column = merged.ranks, -(-len(merged.ranks) // _COLUMNS)
        starts = range(0, len(ranks), per_column)
        column = (
            "each rank" if per_column == 1 else f"{per_column} neighbouring ranks, with the least of them"
        )
        yield HeatMap(
            "Headroom of each module on each rank",
            f"A column for {column}. A bit is a doubling that the largest element of the module's weights and outputs"
            " has left before it overflows. The worst module comes first.",
            "bits of headroom by module and rank; the table below has the least of each module",
            rows=list(map(module_name, shown)),
            first=[ranks[i] for i in starts],
            last=[ranks[min(i + per_column, len(ranks)) - 1] for i in starts],
            columns=("rank", "ranks"),
            cells=headroom_cells(np.fmin.reduceat(np.array(bits), starts, axis=1)),
            none="no range",
            after=f"{rest:,} more modules are not shown." if rest else "",
        )
        columns = {
            "module": TEXT,
            **dict.fromkeys(("ranks", "spread", "least", "median", "most", "not finite"), NUMBER),
        }
        yield Table(
            "spread",
            "Spread between ranks",
            {**columns, "outlying ranks": TEXT},
            [_spread_row(merged.summary(name)) for name in shown],
            "Bits of headroom. Outlying: further from the median than a bit, and than four times the median distance"
            " from it.",
        )
    yield _difference_table(merged.differences())
    if merged.left_out:
        rest = len(merged.left_out) - _WORST
        files = [[why] for why in merged.left_out[:_WORST]]
        yield Table(
            "left-out", "Left out", {"file": TEXT}, files, after=f"and {rest} more" if rest > 0 else ""
        )


def _spread_row(one: ModuleHeadroom) -> list[str]:
    rest = one.num_outlying - len(one.outlying)
    far = ", ".join(f"{rank} ({_number(bits)})" for rank, bits in one.outlying)
    return [
        module_name(one.module),
        str(one.num_ranks),
        spell_bits(one.spread),
        f"{_number(one.least)} (rank {one.least_rank})",
        _number(one.median),
        f"{_number(one.most)} (rank {one.most_rank})",
        str(one.num_nonfinite),
        f"{far} and {rest} more" if rest > 0 else far,
    ]


def _difference_table(differences: Sequence[WeightRanges]) -> Table:
    columns = {"batch": NUMBER, "module": TEXT, "weight": TEXT, "ranges": TEXT}
    if not differences:
        hint = "Of what two ranks or more saw under one name, with one shape, in one batch."
        return Table("differences", "No weight differs between ranks", {}, (), hint)
    rest = len(differences) - _WORST
    return Table(
        "differences",
        "Weights that are not alike on all ranks",
        columns,
        [[one.batch, module_name(one.module), one.label, _spell_ranges(one)] for one in differences[:_WORST]],
        f"First in batch {differences[0].batch}: the replicas have come apart, or the ranks hold different parts of a"
        " model under the same names.",
        f"and {rest} more" if rest > 0 else "",
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
