"""A merge as text: who was first, weights that differ, the headroom of each module on each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..report import text
from ..util.visible import visible

if TYPE_CHECKING:
    from .merge import Merged, ModuleHeadroom, WeightRanges
    from .merge_digest import Digest

_WORST = 20  # modules and weights shown; the document has all
_MOST_RANKS = 16  # named one by one
_SPANS = 8  # of ranks on end, where there are more
_RANGES = 4  # of a weight that differs


def merged_text(merged: Merged) -> str:
    """The whole as text, without a newline at its end."""
    return "\n".join(map(visible, _lines(merged)))


def spell_ranks(ranks: Sequence[int]) -> str:
    """The ranks (ascending) as words: "0, 2, 5", or of more than 16 "0 to 62, 64 to 127"."""
    if len(ranks) <= _MOST_RANKS:
        return ", ".join(map(str, ranks))
    spans: list[tuple[int, int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    words = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans[:_SPANS])
    left = sum(b - a + 1 for a, b in spans[_SPANS:])
    return f"{words} and {left} more" if left else words


def count_ranks(number: int) -> str:
    """The number with its noun."""
    return f"{number} rank" if number == 1 else f"{number} ranks"


def spell_bits(bits: float | None) -> str:
    """A number of bits; "" where there is none."""
    return "" if bits is None else f"{bits:.1f}"


def finding_summary(digest: Digest) -> str:
    """What this rank found and where, in one line that ends with its number; "" for one without a finding."""
    if digest.finding is None:
        return ""
    finding = replace(digest.finding, rank=0)  # said here for rank 0 too
    return f"{text.summary(finding)}, rank {digest.rank}"


def attempt_words(merged: Merged) -> str:
    """Which attempt it is of; "" where the reports name none."""
    return str(merged.attempt or "")


def other_summary(merged: Merged) -> str:
    """An attempt that was not merged: which one, of how many ranks, and in short where it failed."""
    who = f"{attempt_words(merged) or 'reports that name no attempt'}, {count_ranks(len(merged.digests))}"
    first = merged.origins
    if not first:
        return f"{who}: without a finding"
    more = f" and {count_ranks(len(first) - 1)} more at the same place" if len(first) > 1 else ""
    return f"{who}: {finding_summary(first[0])}{more}"


def _lines(merged: Merged) -> Iterable[str]:
    ranks = merged.ranks
    yield f"{count_ranks(len(ranks))}: {spell_ranks(ranks)}"
    if words := attempt_words(merged):
        yield f"Of {words}"
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
    """One of the ranges of a weight, and who has it."""
    return f"{low:.6e} to {high:.6e} on rank {spell_ranks(ranks)}"


def _difference_lines(found: Sequence[WeightRanges]) -> Iterable[str]:
    if not found:
        return
    yield ""
    yield f"Weights that are not alike on all ranks, first in batch {found[0].batch}: the replicas have come apart,"
    yield "or the ranks hold different parts of a model under the same names"
    for one in found[:_WORST]:
        told = "; ".join(range_line(*part) for part in one.ranges[:_RANGES])
        more = f"; and {len(one.ranges) - _RANGES} more ranges" if len(one.ranges) > _RANGES else ""
        yield f"  batch {one.batch} {text.module_name(one.module)} {one.label}: {told}{more}"
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
        yield f"{text.module_name(name):<{width}} {spread:>8} {cells}".rstrip()


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
        line = f"{text.module_name(row.module):<{width}} {spell_bits(row.spread):>8} {cells} {row.num_nonfinite:>10}"
        yield f"{line}  {far}{more}".rstrip()


def _width(names: Sequence[str]) -> int:
    return max((len(text.module_name(name)) for name in names), default=6)
