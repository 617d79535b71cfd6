"""Report of a spike: a loss or a gradient norm that jumped, with the first tensor that left its own history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypeAlias

from ..records.fields import body_of, parsed, plain, read
from ..records.record import Frame, Note, event_frame
from ..util.messages import module_name, visible
from .page import NUMBER, TEXT, InNotebook, Table, page
from .report import Report, read_report
from .text import Fact

SCHEMA = "nanwatch.spike"
VERSION = 2

Cause: TypeAlias = Literal["learning rate", "weight", "input", "module", "gradient", "loss"]
_NEXT: dict[Cause, str] = {
    "learning rate": "look at the schedule and its warm-up: steps of this size are what the weights have not seen.",
    "weight": "look at what wrote into the weight between two steps: weight decay, a loaded checkpoint, the optimizer.",
    "input": "look at the samples of this batch: the first module of the model got what no batch before it had.",
    "module": "look at this module's inputs in the batch, and at what changed in it.",
    "gradient": "every tensor of the forward is as usual: look at the backward of this module, and at hooks on its"
    " gradients.",
    "loss": "every tensor of the forward is as usual: look at the targets of this batch, and at the loss function.",
}
_SHOWN = 200  # rows of a table


@dataclass(frozen=True, slots=True)
class Departure:
    """Value that left its history: `value` where `usual` is the median, so many deviations above it.

    `deviations` is inf and `usual` 0 for a tensor that was all zero or missing in every step before. `module` is "" for
    the root and for the loss and the norm of all gradients.
    """

    module: str
    label: str
    value: float
    usual: float
    deviations: float

    @property
    def numbers(self) -> str:
        """The value, its usual size, and the distance in words."""
        if not self.usual and self.deviations == inf:
            return f"{self.value:.3g}, and zero or missing in all steps before"
        far = "" if self.deviations == inf else f" ({self.deviations:.0f} deviations)"
        return f"{self.value:.3g}, usually {self.usual:.3g}{far}"

    @property
    def place(self) -> str:
        """The tensor and its module."""
        return f"`{self.label}` of {module_name(self.module)}"


@dataclass(frozen=True, slots=True)
class SpikeReport(InNotebook):
    """A spike: what jumped in `batch`, the class of the first signal that left its history, and its tensor.

    `jumps` are of the loss and of the gradients. `first` is the tensor that shows the cause, None where no tensor has
    left its history. `forward` and `backward` are all that have, in the order in which they were made. `rates` are the
    learning rate before and after it jumped. `shares` are the samples with the largest shares of the loss, where the
    loss was handed over by sample.

    Examples:
        >>> from nanwatch.report.spike import Departure, SpikeReport
        >>> jump = Departure("", "loss", 9.1, 2.4, 55.0)
        >>> print(SpikeReport(410, 0, (jump,), "loss"))
        spike in batch 410: loss 9.1, usually 2.4 (55 deviations)
        Cause: loss.
        Next:  every tensor of the forward is as usual: look at the targets of this batch, and at the loss function.
    """

    batch: int
    rank: int
    jumps: tuple[Departure, ...]
    cause: Cause
    first: Departure | None = None
    forward: tuple[Departure, ...] = ()
    backward: tuple[Departure, ...] = ()
    rates: tuple[float, float] | None = None
    shares: tuple[tuple[int, float], ...] = ()
    files: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The line that names what jumped."""
        return f"spike in batch {self.batch}: " + "; ".join(
            f"{jump.label} {jump.numbers}" for jump in self.jumps
        )

    @property
    def summary(self) -> str:
        """The report in one line."""
        first = "" if self.first is None else f", first in {self.first.place}: {self.first.numbers}"
        return f"{self.headline}; cause: {self.cause}{first}"

    def rows(self) -> Frame:
        """Return the frame that stands for the spike in a trace, at the tensor that shows its cause."""
        at = self.first or next(iter(self.jumps))
        return event_frame(self.batch, at.module, at.label, type(self).__name__, Note("spike", self.summary))

    def facts(self) -> Iterator[Fact]:
        """Yield what stands behind the headline."""
        yield Fact("Cause", f"{self.cause}.")
        if self.first is not None:
            yield Fact("First", f"{self.first.place}: {self.first.numbers}.")
        for head, departures in (("Then", self.forward), ("Back", self.backward)):
            rest = [departure for departure in departures if departure != self.first]
            if rest:
                more = f"; then {len(rest) - 1} more" if len(rest) > 1 else ""
                yield Fact(head, f"{rest[0].place}: {rest[0].numbers}{more}.")
        if self.rates is not None:
            yield Fact("Rate", f"the learning rate went from {self.rates[0]:.3g} to {self.rates[1]:.3g}.")
        if self.shares:
            shares = ", ".join(f"{number} ({share:.0%})" for number, share in self.shares)
            yield Fact("Samples", f"with the largest shares of the loss: {shares}.")
        yield Fact("Next", _NEXT[self.cause])
        yield from (Fact("Note", remark) for remark in self.remarks)
        yield from (Fact("File", file) for file in self.files)

    def to_text(self) -> str:
        """Return the report as text."""
        return "\n".join(visible(str(line)) for line in (self.headline, *self.facts()))

    def to_json(self) -> str:
        """Return one strict JSON document; nan and the infinities are strings, as in `Report.to_json`."""
        document: dict[str, Any] = {"schema": SCHEMA, "version": VERSION, **plain(self)}
        return json.dumps(document, allow_nan=False, indent=1)

    @classmethod
    def from_json(cls, document: str) -> SpikeReport:
        """Return the report that `to_json` wrote. Raise ValueError with the place for anything else."""
        return parsed(document, _read_spike, "a nanwatch spike report")

    def to_html(self) -> str:
        """Return the report as one page of HTML without a script. Raises ImportError without jinja2."""
        departures = [("forward", x) for x in self.forward] + [("backward", x) for x in self.backward]
        rows = [
            [phase, module_name(x.module), x.label, *(f"{n:.3g}" for n in (x.value, x.usual, x.deviations))]
            for phase, x in departures[:_SHOWN]
        ]
        columns = dict.fromkeys(("phase", "module", "tensor"), TEXT)
        columns |= dict.fromkeys(("abs max", "usually", "deviations"), NUMBER)
        rest = len(departures) - _SHOWN
        more = f"and {rest:,} more, which the JSON has" if rest > 0 else ""
        sections = [Table("departures", "Left its history", columns, rows, after=more)] if rows else []
        amount = f"batch {self.batch}, rank {self.rank}"
        who, facts = "SpikeReport.to_html()", tuple(self.facts())
        return page(who, self.headline, amount, facts, sections, is_bad=True)


def _read_spike(document: Any) -> SpikeReport:
    report: SpikeReport = read(SpikeReport, body_of(document, SCHEMA, VERSION), "report")
    return report


def read_saved(document: str) -> Report | SpikeReport:
    """Return the report of a failure or of a spike from its JSON. Raise ValueError with the place for anything else."""

    def read_either(members: Any) -> Report | SpikeReport:
        is_spike = isinstance(members, dict) and members.get("schema") == SCHEMA
        return _read_spike(members) if is_spike else read_report(members)

    return parsed(document, read_either, "a nanwatch report")
