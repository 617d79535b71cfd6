"""A difference in words, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .text import module_name

if TYPE_CHECKING:
    from .difference import Difference, Place

_SHOWN = 5


def diff_lines(found: Difference) -> Iterator[str]:
    """The first place, the first of every other kind, what grew, and what was not compared; one line each."""
    yield f"A: {found.a}"
    yield f"B: {found.b}"
    many = f"{found.num_records:,} records of {_plural(len(found.batches), 'batch', 'batches')}"
    if found.first is None:
        yield f"No difference in {many} (rtol {found.rtol:g})."
    else:
        yield f"They part in {found.num_apart:,} of {many} (rtol {found.rtol:g})."
        yield ""
        yield f"First: {place_line(found.first)}"
        for place in found.firsts[1:]:
            yield f"First by {place.kind}: {place_line(place)}"
    if found.grew:
        yield ""
        yield "Grew most from A to B:"
        for one in found.grew:
            yield (
                f"{_factor(one.factor)}  {one.a:8.2e} -> {one.b:8.2e}  {one.label} of {module_name(one.module)}"
                f" in batch {one.batch}"
            )
    notes = [*found.remarks]
    notes += [f"only in A: {_listed(found.only_a)}"] if found.only_a else []
    notes += [f"only in B: {_listed(found.only_b)}"] if found.only_b else []
    if notes:
        yield ""
        yield from (f"Not compared: {note}." for note in notes)


def place_line(place: Place) -> str:
    """`output of h.0.mlp (MLP) in batch 3: abs_max 1 against 2 (relative difference 0.5)`."""
    other = ""
    if (place.module_b, place.class_b) != (place.module, place.class_name):
        other = f", in B {module_name(place.module_b)} ({place.class_b})"
    batch = f"batch {place.batch}" + ("" if place.batch_b == place.batch else f" and batch {place.batch_b}")
    return (
        f"`{place.label}` of {module_name(place.module)} ({place.class_name}){other} in {batch}: {place.what}"
    )


def _factor(factor: float) -> str:
    return f"x {factor:8.2f}" if factor < 1e5 else f"x {factor:8.1e}"


def _listed(modules: Sequence[tuple[str, int]]) -> str:
    shown = [
        f"{module_name(name)} ({_plural(count, 'record', 'records')})" for name, count in modules[:_SHOWN]
    ]
    more = [f"{len(modules) - _SHOWN} modules more"] if len(modules) > _SHOWN else []
    return ", ".join(shown + more)


def _plural(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
