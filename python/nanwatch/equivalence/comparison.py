"""Result of `nanwatch.compare`, and its text, JSON and page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..report.notebook import InNotebook
from ..report.page import ABSENT, GONE, NUMBER, TEXT, Chart, HeatMap, Section, Table, page
from ..util.reading import plain
from ..util.visible import module_name
from .results import as_json, as_text, wrapped

# Rows of the page's table, and rows and columns of its map of tokens.
_ABOVE, _ROWS, _COLUMNS = 40, 300, 200


@dataclass(frozen=True, slots=True)
class ModuleError:
    """Relative errors of a module's input and output between the two models, and the noise floor of the output.

    `module_a` or `module_b` names several where the other is their fused projection. An error is None where the
    tensors could not be compared. `tokens` are the errors by position in the sequence.
    """

    module_a: str
    module_b: str
    class_a: str
    class_b: str
    input_error: float | None
    error: float | None
    floor: float
    tokens: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """Both names in words."""
        one, other = (
            f"{module_name(self.module_a)} ({self.class_a})",
            f"{module_name(self.module_b)} ({self.class_b})",
        )
        return one if one == other else f"{one} | {other}"


@dataclass(frozen=True, slots=True)
class Comparison(InNotebook):
    """Result of `nanwatch.compare`.

    `equal` is None when nothing could be said. `equal_in` is the 16-bit dtype whose rounding hides a difference that
    float32 copies show: then all errors are theirs. `first` is the first module whose inputs agree and whose outputs
    do not, or None with the reason in `why`. `where` says where in it the difference begins, `likely` what it looks
    like. `modules` has all compared modules in the order of their calls in A. `floor` says how the noise was measured.
    """

    equal: bool | None
    first: ModuleError | None
    where: str
    likely: tuple[str, ...]
    why: str
    floor: str
    factor: float
    calls_a: int
    calls_b: int
    modules: tuple[ModuleError, ...]
    remarks: tuple[str, ...] = ()
    equal_in: str = ""

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        return as_json(self)

    def to_text(self) -> str:
        """Return the result for people."""
        if self.equal:
            lines = [f"{self.headline}: {self._amount}."]
        elif self.first is None:
            lines = [f"{self.headline}: {self.why}.", "", f"Compared:   {self._amount}"]
        else:
            found = self.first
            lines = [
                f"{self.headline}.",
                "",
                f"Input:      {spell_error(found.input_error)}",
                f"Output:     {self._output}",
            ]
            lines += wrapped("Where:", self.where)
            for one in self.likely:
                lines += wrapped("Looks like:", one)
            lines += [f"Compared:   {self._amount}"]
        lines += [f"Noise:      {self.floor}"]
        return as_text(lines, self.remarks)

    def to_html(self) -> str:
        """Return a page that opens offline, with charts of the error over depth and over tokens.

        Needs `jinja2`; write it as UTF-8.
        """
        facts, is_bad = self.facts(), not self.equal
        return page(
            "Comparison.to_html()", self.headline, self._amount, facts, self.sections(), is_bad=is_bad
        )

    def facts(self) -> list[tuple[str, str]]:
        """Return the facts of the page."""
        first = self.first
        facts = (
            [("Input", spell_error(first.input_error)), ("Output", self._output)] if first is not None else []
        )
        facts += [("Where", self.where), *(("Likely", words) for words in self.likely), ("Why", self.why)]
        facts += [("Noise", self.floor), *(("Note", remark) for remark in self.remarks)]
        return [(head, body) for head, body in facts if body]

    def sections(self) -> list[Section]:
        """Return the charts and tables of the page."""
        rows = self.modules
        if not rows:
            return []
        names = [one.name for one in rows]
        values = (
            ("error", "output", "", [one.error for one in rows]),
            ("error of the input", "input", "dotted", [one.input_error for one in rows]),
            ("limit", "near", "dashed", [self.factor * one.floor for one in rows]),
            ("noise floor", "quiet", "dashed", [one.floor for one in rows]),
        )
        x = list(range(len(rows)))
        lines: list[dict[str, Any]] = [
            {"name": name, "color": color, "dash": dash, "at": names, "x": x, "y": [plain(y) for y in line]}
            for name, color, dash, line in values
        ]
        if self.first in rows:
            i = rows.index(self.first)
            mark = {"name": "first", "color": "gone", "isMark": True, "at": names[i : i + 1]}
            lines.append({**mark, "x": [i], "y": [plain(self.first.error)]})
        sections: list[Section] = [
            Chart(
                "depth",
                "Error over depth",
                "Relative error of every compared module's output, in the order of the calls in A. A zero, and what is"
                " not finite, is a gap.",
                "relative error and noise floor of each module's output, on a logarithmic scale",
                "call of a module, in order",
                "relative error",
                lines,
            )
        ]
        sections += _tokens(rows)
        above = [one for one in rows if one.error is not None and one.error > self.factor * one.floor][
            :_ABOVE
        ]
        if above:
            columns = {
                "in A": TEXT,
                "in B": TEXT,
                "input error": NUMBER,
                "output error": NUMBER,
                "floor": NUMBER,
            }
            cells = [
                [
                    *(module_name(one.module_a), module_name(one.module_b)),
                    *(spell_error(one.input_error), spell_error(one.error), f"{one.floor:.2g}"),
                ]
                for one in above
            ]
            hint = f"The first {len(above)}, in the order of the calls in A."
            sections.append(Table("above", "Modules above the floor", columns, cells, hint))
        return sections

    @property
    def _amount(self) -> str:
        pairs = f"{len(self.modules):,} pair{'' if len(self.modules) == 1 else 's'} of module calls"
        return f"{pairs} (A made {self.calls_a:,} calls, B {self.calls_b:,})"

    @property
    def _output(self) -> str:
        found = self.first
        if found is None or found.error is None:
            return spell_error(None)
        side = "above" if found.error > self.factor * found.floor else "within"
        return f"{spell_error(found.error)}, {side} {self.factor:g} x the floor of {found.floor:.2g}"

    @property
    def headline(self) -> str:
        """The result in a line."""
        if self.equal:
            return "Equal within the noise floor"
        if self.first is None:
            return "No module can be named"
        if self.equal_in:
            size = f", {spell_error(self.first.error)}"
            return f"Equal in {self.equal_in}; the float32 copies differ first in {self.first.name}{size}"
        return f"Differ first in {self.first.name}"


def _tokens(modules: Sequence[ModuleError]) -> list[Section]:
    """Return the map of errors by module and token, if there are any.

    A cell is the largest error in it, so that no error is lost where there are more tokens than columns.
    """
    lengths = Counter(len(one.tokens) for one in modules if one.tokens)
    if not lengths:
        return []
    ((length, _),) = lengths.most_common(1)
    rows = [one for one in modules if len(one.tokens) == length]
    columns, lines = (range(0, n, -(-n // most)) for n, most in ((length, _COLUMNS), (len(rows), _ROWS)))
    errors = np.array([one.tokens for one in rows])
    errors = np.maximum.reduceat(np.maximum.reduceat(errors, columns, axis=1), lines, axis=0)
    # A line of several modules has the name of the worst.
    worst = [max(rows[i : i + lines.step], key=lambda one: max(one.tokens)) for i in lines]
    # The worst cell of a map is the least: hundredths of a decade, larger errors lower.
    is_known = np.isfinite(errors) & (errors > 0)
    decades = np.rint(-100 * np.log10(np.where(is_known, errors, 1.0))).astype(np.int64)
    cells = np.where(is_known, decades, np.where(errors == 0, ABSENT, GONE))
    low, high = (int(decades[is_known].min()), int(decades[is_known].max())) if is_known.any() else (0, 1)
    words = "a token" if columns.step == 1 else f"{columns.step} tokens, of which the largest error is shown"
    ends = [f"{10 ** (-end / 100):.1e}" for end in (low, high)]
    return [
        HeatMap(
            "Error over tokens",
            f"A row is a module, a column {words}. Where there is no colour, there is no difference.",
            "relative error by module and position in the sequence",
            rows=[one.name for one in worst],
            first=[*columns],
            last=[min(at + columns.step, length) - 1 for at in columns],
            columns=("token", "tokens"),
            cells=cells,
            stops=((low, "gone"), ((low + high) / 2, "low"), (high + 1, "low", 0.15)),
            key=(("gone", f"an error of {ends[0]}, or inf"), ("low", f"down to {ends[1]}, paler with less")),
            none="no difference",
            unit="",
            magnitudes=errors,
            measure="error",
        )
    ]


def spell_error(error: float | None) -> str:
    """Return a relative error in words."""
    return "not comparable" if error is None else f"{error:.2g}"
