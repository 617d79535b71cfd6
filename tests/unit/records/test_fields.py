"""Documents from anybody, read by the annotations of what they stand for."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pytest

from nanwatch.records.fields import plain, read


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


DOCUMENT: dict[str, Any] = {"kind": "a", "class": "Linear", "many": [1, "nan"], "pair": [1, "one"]}
DOCUMENT |= {"inner": {"name": "x"}, "by_name": {"k": {"name": "y", "size": 3}}}


def test_what_is_written_is_read_back_and_a_default_may_be_missing() -> None:
    outer = read(Outer, {**DOCUMENT, "inner": {"name": "x", "size": None}}, "it")
    assert (outer.class_, outer.inner, outer.by_name) == ("Linear", Inner("x"), {"k": Inner("y", 3)})
    assert (outer.pair, outer.names) == ((1, "one"), ())
    assert plain(outer) == {**DOCUMENT, "many": [1.0, "nan"], "names": []}


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
        read(Outer, {**DOCUMENT, **change}, "it")
