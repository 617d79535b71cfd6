"""Readers that follow the annotations of a class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest

from nanwatch.util import reading


class Inner(NamedTuple):
    name: str
    size: int | None = None


@dataclass(frozen=True)
class Outer:
    kind: Literal["a", "b"]
    class_: str
    inner: Inner
    by_name: dict[str, Inner]
    many: list[float]
    pair: tuple[int, str]
    names: tuple[str, ...] = ()
    rest: dict[str, int] = field(default_factory=dict)


DOCUMENT = {
    "kind": "a",
    "class": "Linear",
    "inner": {"name": "x"},
    "by_name": {"k": {"name": "y", "size": 3}},
    "many": [1, "nan"],
    "pair": [1, "one"],
}


def test_what_is_written_is_read_back_and_a_default_may_be_missing() -> None:
    read = reading.read(Outer, DOCUMENT, "it")
    assert (read.class_, read.inner, read.by_name) == ("Linear", Inner("x"), {"k": Inner("y", 3)})
    assert (read.pair, read.names, read.rest) == ((1, "one"), (), {})
    assert reading.plain(read) == {**DOCUMENT, "many": [1.0, "nan"], "names": [], "rest": {}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "c"}, "it.kind should be one of 'a', 'b', got 'c'"),
        ({"inner": {"name": "x", "size": "y"}}, "it.inner.size should be an integer, got 'y'"),
        ({"by_name": {"k": {}}}, r"it.by_name\['k'\] has no 'name'"),
        ({"many": [1, None]}, r"it.many\[1\] should be a number"),
        ({"pair": [1]}, "it.pair should be a list of 2, got list of 1"),
        ({"class_": "x"}, "it has 'class_', which this version does not know"),
    ],
)
def test_an_error_names_the_place_and_what_is_accepted(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reading.read(Outer, {**DOCUMENT, **change}, "it")
