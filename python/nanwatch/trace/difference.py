"""Result of `nanwatch.diff`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from ..report.page import Chart, Section
from ..util.reading import plain
from ..util.visible import module_name
from .result import Result, plural

Kind: TypeAlias = Literal["isfinite", "shape", "dtype", "range", "bits"]
# In one record the first of these that differs is named.
KINDS: tuple[Kind, ...] = ("isfinite", "shape", "dtype", "range", "bits")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class RecordPair:
    """A record of A and its match in B, which differ. `batch`, `module` and `class_name` are A's, those with `_b` B's.

    `kind` is "isfinite", "shape", "dtype", "range" or "bits". `what` says it in words, A's value first. `role` is A's.
    """

    batch: int
    module: str
    class_name: str
    label: str
    role: str
    kind: Kind
    what: str
    batch_b: int
    module_b: str
    class_b: str

    def __str__(self) -> str:
        counterpart = ""
        if (self.module_b, self.class_b) != (self.module, self.class_name):
            counterpart = f", in B {module_name(self.module_b)} ({self.class_b})"
        batch = f"batch {self.batch}" + ("" if self.batch_b == self.batch else f" and batch {self.batch_b}")
        place = f"`{self.label}` of {module_name(self.module)} ({self.class_name}){counterpart} in {batch}"
        return f"{place}: {self.what}"


class Growth(NamedTuple):
    """A record whose abs_max is `b` where it was `a`, in the batch where `factor`, b / a, is the largest."""

    module: str
    label: str
    batch: int
    a: float
    b: float
    factor: float

    def __str__(self) -> str:
        factor = f"{self.factor:.2f}" if self.factor < 1e5 else f"{self.factor:.1e}"
        place = f"{self.label} of {module_name(self.module)} in batch {self.batch}"
        return f"x {factor}, {self.a:.2e} -> {self.b:.2e}, {place}"


@dataclass(frozen=True, slots=True)
class Difference(Result):
    """Result of `diff`.

    `first` is the first pair where the two part, None where they do not. `grew` are the weights, buffers and outputs
    that grew most, by the factor. `num_records` were compared, `num_apart` of them part, `num_bits` were compared by
    their bits. `only_a` and `only_b` are the modules, with the number of records, for which the other side has nothing;
    they are no difference. `outputs` are (name, abs_max in A, abs_max in B) of one batch, in the order of calls: the
    first batch where the two part, or the last.

    Examples:
        >>> import json, nanwatch, pathlib, torch
        >>> model = torch.nn.ReLU()
        >>> with nanwatch.watch(model, trace="run.parquet"):
        ...     for scale in (1.0, 2.0):
        ...         output = model(torch.tensor([scale]))
        >>> difference = nanwatch.diff("run.parquet", batches=(0, 1))
        >>> difference.differs, difference.num_records, difference.num_apart
        (True, 2, 2)
        >>> print(difference.grew[0])
        x 2.00, 1.00e+00 -> 2.00e+00, output of the root module in batch 0
        >>> json.loads(difference.to_json())["first"]["label"]
        'input[0]'
        >>> size = pathlib.Path("diff.html").write_text(difference.to_html(), encoding="utf-8")
    """

    a: str
    b: str
    rtol: float
    first: RecordPair | None
    grew: tuple[Growth, ...]
    num_records: int
    num_apart: int
    num_bits: int
    batches: tuple[tuple[int, int], ...]
    only_a: tuple[tuple[str, int], ...]
    only_b: tuple[tuple[str, int], ...]
    remarks: tuple[str, ...]
    outputs: tuple[tuple[str, float, float], ...]

    @property
    def differs(self) -> bool:
        """Return whether the two differ anywhere."""
        return self.first is not None

    @property
    def equal(self) -> bool:
        """Return whether the two differ nowhere."""
        return self.first is None

    @property
    def headline(self) -> str:
        """The result in a line."""
        if self.first is None:
            return "No difference"
        return f"They part at {self.first.label} of {module_name(self.first.module)}"

    @property
    def amount(self) -> str:
        """The number of compared records."""
        many = f"{plural(self.num_records, 'record')} of {plural(len(self.batches), 'batch', 'batches')}"
        bits = f", {self.num_bits:,} of them bit by bit" if self.num_bits else ""
        return f"{many}, {self.num_apart:,} apart (rtol {self.rtol:g}{bits})"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The first difference, what grew, and what one side lacks."""
        facts = [("A", self.a), ("B", self.b)]
        facts += [] if self.first is None else [("First", str(self.first))]
        facts += [("Grew", str(growth)) for growth in self.grew]
        sides = (("A", self.only_a), ("B", self.only_b))
        return facts + [(f"Only in {side}", _listed(names)) for side, names in sides if names]

    def sections(self) -> list[Section]:
        """Return a chart of the outputs of one batch."""
        names, *sides = zip(*self.outputs, strict=True) if self.outputs else ((), (), ())
        lines: list[dict[str, Any]] = [
            {
                "name": name,
                "color": color,
                "dash": dash,
                "at": names,
                "x": [*range(len(names))],
                "y": plain(values),
            }
            for (name, color, dash), values in zip(
                (("A", "output", ""), ("B", "near", "dotted")), sides, strict=True
            )
        ]
        title = "Largest magnitude of every output, in the order of the calls"
        batch = self.batches[-1][0] if self.first is None else self.first.batch
        label = "abs max of every output in A and in B, on a logarithmic scale"
        hint = f"Batch {batch}; a nan or an inf is a gap."
        chart = Chart("calls", title, hint, label, "call of a module, in order", "largest magnitude", lines)
        return [chart] if names else []


def _listed(modules: Iterable[tuple[str, int]]) -> str:
    names = [f"{module_name(name)} ({plural(count, 'record')})" for name, count in modules]
    more = [f"{len(names) - _SHOWN} modules more"] if len(names) > _SHOWN else []
    return ", ".join(names[:_SHOWN] + more)
