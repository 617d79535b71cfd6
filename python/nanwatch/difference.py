"""The structure that a comparison of two traces ends in: plain, typed, immutable."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal, TypeAlias

from .visible import visible

Kind: TypeAlias = Literal["isfinite", "shape", "dtype", "range"]
# In one record the first of these that differs is named.
KINDS: tuple[Kind, ...] = ("isfinite", "shape", "dtype", "range")


@dataclass(frozen=True, slots=True)
class Place:
    """A record in which two traces part. `batch` and `module` are A's; `batch_b` and `module_b` what answers in B.

    `kind` is "isfinite", "shape", "dtype" or "range"; `what` says it in words, A's value first.
    """

    batch: int
    module: str
    class_name: str
    label: str
    kind: Kind
    what: str
    batch_b: int
    module_b: str
    class_b: str


@dataclass(frozen=True, slots=True)
class Growth:
    """A record whose abs_max is `b` where it was `a`, in the batch where the factor between them is the largest."""

    module: str
    label: str
    batch: int
    a: float
    b: float

    @property
    def factor(self) -> float:
        """b / a; inf beyond 1e308."""
        return self.b / self.a


@dataclass(frozen=True, slots=True)
class Series:
    """Two lines of a chart: abs_max of an output, at the places `x`, in A and in B."""

    name: str
    x: tuple[Any, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """What `diff` found.

    `first` is the first place where the two part, None where they do not; `firsts` the first of each kind. `grew` are
    the weights, buffers and outputs that grew most, by the factor. `num_records` were compared. `only_a` and `only_b`
    are the modules, with the number of records, for which the other side has nothing; they are no difference.
    """

    a: str
    b: str
    rtol: float
    first: Place | None
    firsts: tuple[Place, ...]
    grew: tuple[Growth, ...]
    num_records: int
    num_apart: int
    batches: tuple[tuple[int, int], ...]
    only_a: tuple[tuple[str, int], ...]
    only_b: tuple[tuple[str, int], ...]
    remarks: tuple[str, ...]
    calls: Series
    series: tuple[Series, ...] = field(repr=False)

    @property
    def differs(self) -> bool:
        """Whether they part anywhere."""
        return self.first is not None

    def to_text(self) -> str:
        """A paragraph to read in a terminal, without a newline at its end."""
        from .diff_text import diff_lines

        return "\n".join(map(visible, diff_lines(self)))

    def to_json(self) -> str:
        """`{"differs", "first": {"batch", "module", "label", "what"} or null, "grew": [...]}`."""
        first = self.first
        names = ("batch", "module", "label", "what")
        grew = [
            {"batch": one.batch, "module": one.module, "label": one.label, "abs_max": [one.a, one.b]}
            | {"factor": one.factor if isfinite(one.factor) else str(one.factor)}
            for one in self.grew
        ]
        found = None if first is None else {name: getattr(first, name) for name in names}
        return json.dumps({"differs": self.differs, "first": found, "grew": grew}, allow_nan=False)

    def to_html(self) -> str:
        """One page that opens offline, with charts. Needs `jinja2` and `plotly`; write it as UTF-8."""
        from .diff_html import diff_html

        return diff_html(self)
