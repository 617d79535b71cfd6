"""A merge as one JSON document, for programs and for another merge."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from sys import intern
from typing import TYPE_CHECKING, Any

from . import reading
from .attempt import Attempt, read_attempt
from .merge_digest import Digest, pair_of, place
from .report import plain, read_finding

if TYPE_CHECKING:
    from .merge import Merged

SCHEMA = "nanwatch.merged"
VERSION = 1

# The ranks up to which a document has what each of them had to say, and can be merged with others: 256 such documents
# are 65,536 ranks. Above it there are the summaries alone, which grow with the model and hardly with the job.
MOST_RANKS = 256
_RANGES = 16  # of a weight that differs


def document(merged: Merged) -> dict[str, Any]:
    """The whole for programs; nan and the infinities are spelt as strings, as in a report.

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
            {**plain(replace(one, ranges=one.ranges[:_RANGES])), "num_ranges": len(one.ranges)}
            for one in weights
            if len(one.ranges) > 1
        ],
        "weights": [plain(one) for one in weights] if is_whole else None,
        "other_attempts": [document(one) for one in merged.others],
        "left_out": list(merged.left_out),
    }


# Reading back.


def is_merged(text: str) -> bool:
    """Whether a text that may be a report looks like what `document` made; the schema is its first member."""
    return f'"{SCHEMA}"' in text[:200]


def read_merged(text: str) -> tuple[list[Digest], list[str]]:
    """The digests of a document, and what it left out. Raises ValueError for what cannot be merged with others."""
    return reading.document(text, _digests, "a merged report", "pass what merge --json printed")


def _anything(value: Any, where: str) -> Any:
    return value  # said elsewhere in the document; not read


def _bits(value: Any, where: str) -> float:
    bits = reading.number(value, where)
    if isnan(bits):
        raise reading.fail(where, "a number of bits", value)
    return bits


_RANGE: dict[str, reading.Reader[Any]] = {
    "abs_min": reading.number,
    "abs_max": reading.number,
    "ranks": reading.list_of(reading.count),
}

_WEIGHT: dict[str, reading.Reader[Any]] = {
    "batch": reading.count,
    "module": reading.text,
    "label": reading.text,
    "shape": reading.optional(reading.tuple_of(reading.count)),
    "ranges": reading.list_of(lambda value, where: reading.members(value, where, _RANGE)),
}

_DOCUMENT: dict[str, reading.Reader[Any]] = {
    "schema": reading.one_of((SCHEMA,)),
    "version": reading.one_of((VERSION,)),
    "attempt": reading.optional(read_attempt),
    "ranks": reading.list_of(reading.count),
    "num_failed": reading.count,
    "origin_ranks": _anything,
    "origins": _anything,
    "findings": reading.list_of(read_finding),
    "headroom": _anything,
    "headroom_bits": reading.optional(reading.mapping_of(reading.list_of(reading.optional(_bits)))),
    "differences": _anything,
    "weights": reading.optional(reading.list_of(lambda value, where: reading.members(value, where, _WEIGHT))),
    "other_attempts": reading.list_of(_anything),
    "left_out": reading.list_of(reading.text),
}


def _digests(found: Any) -> tuple[list[Digest], list[str]]:
    found = _members(found, "document")
    if not _is_whole(found):
        raise ValueError(_summaries(found))
    digests, left_out = _of_ranks(found), list(found["left_out"])
    for number, other in enumerate(found["other_attempts"]):
        other = _members(other, f"document.other_attempts[{number}]")
        if _is_whole(other):
            digests += _of_ranks(other)
        else:
            left_out.append(f"{other['attempt']}: {_summaries(other)}")
    return digests, left_out


def _members(found: Any, where: str) -> dict[str, Any]:
    if isinstance(found, dict):
        found = {"attempt": None, "other_attempts": [], **found}  # earlier documents have neither
    return reading.members(found, where, _DOCUMENT)


def _is_whole(found: dict[str, Any]) -> bool:
    return found["headroom_bits"] is not None and found["weights"] is not None


def _summaries(found: dict[str, Any]) -> str:
    return (
        f"it is of {len(found['ranks'])} ranks and has their summaries alone; merge groups of up to {MOST_RANKS} ranks"
        " first, and then their documents"
    )


def _of_ranks(found: dict[str, Any]) -> list[Digest]:
    ranks: list[int] = found["ranks"]
    attempt: Attempt | None = found["attempt"]
    findings = {one.rank: one for one in found["findings"]}
    digests = {rank: Digest(rank, findings.get(rank), {}, {}, attempt) for rank in ranks}
    if len(digests) != len(ranks) or not findings.keys() <= digests.keys():
        raise ValueError("its findings are not of its ranks")
    for name, column in found["headroom_bits"].items():
        if len(column) != len(ranks):
            raise ValueError(f"document.headroom_bits has {len(column)} numbers for {len(ranks)} ranks")
        for rank, bits in zip(ranks, column, strict=True):
            if bits is not None:
                digests[rank].headroom[intern(name)] = bits
    for weight in found["weights"]:
        which = place(weight["batch"], weight["module"], weight["label"], weight["shape"])
        for one in weight["ranges"]:
            pair = pair_of(one["abs_min"], one["abs_max"])
            for rank in one["ranks"]:
                if rank not in digests:
                    raise ValueError(f"document.weights names rank {rank}, which is not among its ranks")
                digests[rank].weights[which] = pair
    return list(digests.values())
