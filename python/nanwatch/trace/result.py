"""Result of `nanwatch.compare`, `diff` and `twice`, as text, JSON and a page."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import NamedTuple

from ..records.fields import plain
from ..report.page import Chart, InNotebook, Line, page
from ..util.messages import module_name, visible

SCHEMA, VERSION = "nanwatch.comparison", 2
# Columns before the words of a fact, and of a whole line.
_INDENT, _WIDTH = 12, 100


class Place(NamedTuple):
    """Module of A and the one of B that it was compared with, or a tensor of both, and how far they are apart.

    `module_a` or `module_b` names several where the other is their fused projection. `label` is the tensor, as
    "output[0]", "" for the whole call. `batch` is that of A, None for `compare`. `kind` is how a tensor differs in a
    trace ("isfinite", "shape", "dtype", "range", "bits"), or what it is in a run of a script ("weight", "buffer",
    "input", "output", "gradient", "step", "end").

    `error` is the relative error of the output, which differs above `limit`. `input_error` is that of the input,
    `cosine` and `largest_difference` are those of the output. They are None where nothing could be compared.
    """

    module_a: str
    module_b: str
    class_a: str
    class_b: str
    label: str = ""
    batch: int | None = None
    kind: str = ""
    input_error: float | None = None
    error: float | None = None
    limit: float | None = None
    cosine: float | None = None
    largest_difference: float | None = None

    @property
    def name(self) -> str:
        """The modules and classes of both sides in words."""
        a = f"{module_name(self.module_a)} ({self.class_a})"
        b = f"{module_name(self.module_b)} ({self.class_b})"
        return a if a == b else f"{a} | {b}"


@dataclass(frozen=True, slots=True)
class Comparison(InNotebook):
    """Result of `nanwatch.compare`, `diff` and `twice`.

    `equal` is None where nothing can be said. `first` is the first place where the two differ. `facts` are (head,
    words) in the order in which a reader needs them, and `compared` counts what was compared. `remarks` say what was
    not compared, and what may mislead. `modules` has every module that `compare` has compared, in the order of the
    calls in A.

    Examples:
        >>> import json, nanwatch, pathlib, torch
        >>> model = torch.nn.ReLU()
        >>> with nanwatch.watch(model, trace="run.parquet"):
        ...     for scale in (1.0, 2.0):
        ...         output = model(torch.tensor([scale]))
        >>> difference = nanwatch.diff("run.parquet", batches=(0, 1))
        >>> difference.equal, difference.first.label, difference.first.kind
        (False, 'input[0]', 'range')
        >>> difference.words("Grew")
        ['x 2.00, 1.00e+00 -> 2.00e+00, output of the root module in batch 0']
        >>> json.loads(difference.to_json())["first"]["label"]
        'input[0]'
        >>> size = pathlib.Path("diff.html").write_text(difference.to_html(), encoding="utf-8")
    """

    equal: bool | None
    headline: str
    first: Place | None
    facts: tuple[tuple[str, str], ...]
    compared: str
    remarks: tuple[str, ...] = ()
    modules: tuple[Place, ...] = ()

    def words(self, head: str) -> list[str]:
        """Return the words of the facts with this head."""
        return [words for name, words in self.facts if name == head]

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        document = {"schema": SCHEMA, "version": VERSION, **plain(self)}
        return json.dumps(document, allow_nan=False, indent=2)

    def to_text(self) -> str:
        """Return the result for people, without a newline at its end."""
        lines = [f"{self.headline}.", ""]
        for head, words in (*self.facts, ("Compared", self.compared)):
            lines += _wrapped(head, words)
        notes = [line for remark in self.remarks for line in _wrapped("Note", remark)]
        return "\n".join(map(visible, [*lines, *([""] if notes else []), *notes]))

    def to_html(self) -> str:
        """Return a page that opens offline, with a chart of the `modules`. Needs `jinja2`; write it as UTF-8."""
        facts = [*self.facts, *(("Note", remark) for remark in self.remarks)]
        charts = [self._chart()] if self.modules else []
        return page(
            "Comparison.to_html()", self.headline, self.compared, facts, charts, is_bad=not self.equal
        )

    def _chart(self) -> Chart:
        places, names = self.modules, [place.name for place in self.modules]
        lines = [
            Line("error", "output", names, [place.error for place in places]),
            Line(
                "error of the input", "input", names, [place.input_error for place in places], dash="dotted"
            ),
            Line("limit", "near", names, [place.limit for place in places], dash="dashed"),
        ]
        if self.first is not None and self.first in places:
            at = [places.index(self.first)]
            lines.append(Line("first", "gone", [self.first.name], [self.first.error], at, is_mark=True))
        hint = "Relative error of every compared module's output, in the order of the calls in A. Zeros are gaps."
        label = "relative error and limit of each module's output, on a logarithmic scale"
        across, high = "call of a module, in order", "relative error"
        return Chart("depth", "Error over depth", hint, label, across, high, lines)


def _wrapped(head: str, words: str) -> list[str]:
    line = f"{head + ':' if head else '':<{_INDENT - 1}} {words}"
    indent = " " * _INDENT
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_long_words=False)
