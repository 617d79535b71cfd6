"""Events that a watch reports beside a finding: a step that a GradScaler skipped, ranks that differ, a weight that grew
much, a loss or a gradient norm that jumped, and a step of the optimizer that did not do what was meant.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, TypeAlias

from ..records.fields import body_of, parsed, plain, read
from ..records.record import Frame, Note, event_frame
from ..util.job import spell_runs
from ..util.messages import module_name, visible
from .finding import Finding
from .page import NUMBER, TEXT, InNotebook, Table, page
from .text import Fact


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """Step that was skipped because gradients of `batch` were not finite.

    `scale_before` and `scale_after` are the GradScaler's, None where none was found.
    """

    batch: int
    scale_before: float | None
    scale_after: float | None
    finding: Finding

    def __str__(self) -> str:
        return str(self.note)

    @property
    def note(self) -> Note:
        """Return the note of the gradients that the step did not take."""
        before, after = self.scale_before, self.scale_after
        if before is None:
            return Note("skipped_step")
        fell = "" if after is None or after == before else f" → {after:.15g}"
        return Note("skipped_step", f"scale {before:.15g}{fell}")


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """Tensors that ranks should hold alike to the bit, and do not, as found at a check.

    `step` is the step of the check, counted in batches that followed a step of the optimizer, `equal_at` that of the
    check before, and `batch` the batch in which the difference was reported. `tensors` has the first hundred of
    `num_tensors` names. `num_ranks` of `size` ranks answered, and `num_odd` of these are odd by majority. Where
    `is_majority` is False, each of them may be the odd one. `ranks` and `hosts` name the first of the odd ones.
    """

    step: int
    equal_at: int
    tensors: tuple[str, ...]
    num_tensors: int
    ranks: tuple[int, ...]
    num_odd: int
    hosts: tuple[str, ...]
    num_ranks: int
    size: int
    is_majority: bool
    batch: int = 0

    def __str__(self) -> str:
        more = f" and {self.num_tensors - 1:,} more tensors" if self.num_tensors > 1 else ""
        name = f"{visible(self.tensors[0])}{more}"
        hosts = ", ".join(dict.fromkeys(map(visible, self.hosts)))
        ranks = f"rank {spell_runs(self.ranks)}"
        if not self.is_majority:
            where = f"{name} on one of {ranks} ({hosts}); no majority says on which"
        else:
            count = self.num_ranks - self.num_odd
            odd = ranks if self.num_odd <= len(self.ranks) else f"{self.num_odd} ranks"
            where = f"{name} on {odd} ({hosts}), which {count} other rank{'s' * (count > 1)} hold alike"
        text = f"replicas differ at step {self.step}: {where}; began after step {self.equal_at}"
        if self.num_ranks < self.size:
            text += f"; {self.size - self.num_ranks} of {self.size} ranks did not answer in time"
        return text


@dataclass(frozen=True, slots=True)
class Suspect:
    """A weight whose abs max is much larger than it was, or than that of its siblings.

    `first` is its abs max when the watch began, None where it has not grown much. `siblings` is the pattern of the
    names of the modules that hold the same weight in the other layers, "" where it is not far from theirs. There are
    `num_siblings` of them, whose abs max has the median `median`.
    """

    module: str
    label: str
    abs_max: float
    first: float | None = None
    siblings: str = ""
    num_siblings: int = 0
    median: float | None = None

    def facts(self) -> Iterator[Fact]:
        """Yield the lines of a report."""
        magnitude = f"abs max of `{self.label}` of {module_name(self.module)}"
        if self.first is not None:
            growth = f"{magnitude} from {self.first:.3g} to {self.abs_max:.3g} since the watch began"
            causes = "the learning rate, at weight decay and at the clipping of gradients"
            yield Fact("Grew", f"{growth}: look at {causes}.")
        if self.siblings and self.median is not None:
            rest = f"the median of the {self.num_siblings} other {self.siblings} is {self.median:.3g}"
            yield Fact("Apart", f"{magnitude} is {self.abs_max:.3g}, {rest}.")


SPIKE_SCHEMA, SPIKE_VERSION = "nanwatch.spike", 2

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
_MOST_ROWS = 200  # rows of a table


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
        return f"{self.value:.3g}, usually {self.usual:.3g} ({self.deviations:.0f} deviations)"

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
        >>> from nanwatch.report.events import Departure, SpikeReport
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
        jumps = "; ".join([f"{jump.label} {jump.numbers}" for jump in self.jumps])
        return f"spike in batch {self.batch}: {jumps}"

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
        document: dict[str, Any] = {"schema": SPIKE_SCHEMA, "version": SPIKE_VERSION, **plain(self)}
        return json.dumps(document, allow_nan=False, indent=1)

    @classmethod
    def from_json(cls, document: str) -> SpikeReport:
        """Return the report that `to_json` wrote. Raise ValueError with the place for anything else."""
        return parsed(document, read_spike, "a nanwatch spike report")

    def to_html(self) -> str:
        """Return the report as one page of HTML without a script. Raises ImportError without jinja2."""
        departures = [("forward", x) for x in self.forward] + [("backward", x) for x in self.backward]
        rows = []
        for phase, x in departures[:_MOST_ROWS]:
            numbers = [f"{number:.3g}" for number in (x.value, x.usual, x.deviations)]
            rows.append([phase, module_name(x.module), x.label, *numbers])
        columns = dict.fromkeys(("phase", "module", "tensor"), TEXT)
        columns |= dict.fromkeys(("abs max", "usually", "deviations"), NUMBER)
        rest = len(departures) - _MOST_ROWS
        more = f"and {rest:,} more, which the JSON has" if rest > 0 else ""
        sections = [Table("departures", "Left its history", columns, rows, after=more)] if rows else []
        amount = f"batch {self.batch}, rank {self.rank}"
        who, facts = "SpikeReport.to_html()", tuple(self.facts())
        return page(who, self.headline, amount, facts, sections, is_bad=True)


def read_spike(document: Any) -> SpikeReport:
    """Return the report of a parsed JSON document. Raise ValueError with the place for anything else."""
    report: SpikeReport = read(SpikeReport, body_of(document, SPIKE_SCHEMA, SPIKE_VERSION), "report")
    return report


# Each kind with its headline and its cure. Formats take the numbers of the finding. docs/updates.md lists them. What
# follows a colon tells several forms of one kind apart.
KINDS: Mapping[str, tuple[str, str]] = {
    "no-gradient": (
        "gets no gradient (`.grad` is None), though its module was called: it is unused, or cut off from the loss",
        "Look for detach(), .data, torch.no_grad() or .item() between it and the loss, for a checkpointed block"
        " whose inputs need no gradient, and for zero_grad() between backward and step.",
    ),
    "zero-gradient": (
        "gets a gradient that is exactly 0",
        "Look for a factor of 0 in the loss, for units that are all dead, for zero_grad() after the backward.",
    ),
    "not-in-optimizer": (
        "gets a gradient and is in no optimizer",
        "Make the optimizer after the last layer is in place, from model.parameters(), or add the weight with"
        " add_param_group. What is to stay frozen says requires_grad_(False).",
    ),
    "not-stepped": (
        "is not stepped: its learning rate is 0",
        "Print the groups' lr and the scheduler's factor: an integer division or a schedule that is over gives 0.",
    ),
    "not-stepped:skipped": (
        "is not stepped: the GradScaler skips its steps, also with the scale {scale:.3g}",
        "Its gradients are inf or nan by themselves. watch(gradients=True) says where they become so.",
    ),
    "absorbed": (
        "stays as it is in {absorbed:.0%} of its elements, because their updates round away",
        "Keep the weights in float32 under torch.autocast, keep a float32 master copy, or round stochastically:"
        " {float32:.0%} of the elements would move in float32, {stochastic:.0%} a step with stochastic rounding.",
    ),
    "absorbed:state": (
        "is rounded to 16 bits between steps, or its moments are: {absorbed:.0%} of the elements stay as they are",
        "Keep weights and the optimizer's state in float32 between steps, or round stochastically.",
    ),
    "frozen-moved": (
        "is frozen (requires_grad=False, or Audit(frozen=)), and the step writes it",
        "Freeze before the optimizer is made and give it only what is trained, or set .grad to None when freezing:"
        " an old gradient, momentum and weight decay go on.",
    ),
    "frozen-moved:statistics": (
        "has frozen weights, and its running statistics go on",
        "Call .eval() on the frozen part after each model.train().",
    ),
    "tie-broken": (
        "is a second copy of a weight that was tied",
        "Assign one Parameter to both modules (model.tie_weights()) after loading, before the optimizer is made.",
    ),
    "other-module-trained": (
        "is not trained: the optimizer holds the weights of another module of the same shapes",
        "Make the optimizer from the parameters of the model that computes the loss, after every copy, .to() of a"
        " copy, or wrapper.",
    ),
    "other-module-trained:copy": (
        "is in the optimizer and never called, and the module that it is a copy of is trained in its place",
        "Call the copy, or give the optimizer the module that is called, and freeze the other.",
    ),
    "not-reduced": (
        "was equal on all ranks, and is stepped with gradients that are not",
        "Call the DistributedDataParallel wrapper and not the module in it, wrap after the last .to(), and look at"
        " the process group and the list of weights that gradients are reduced over.",
    ),
    "rank-lost": (
        "was equal on all ranks, and is stepped with a gradient of 0 on rank {rank:.0f}, unlike on others",
        "Look at this rank's batch, and check its links: `torchrun -m nanwatch.netcheck`.",
    ),
    "clipping:one-rank": (
        "was equal on all ranks, and its gradient has another norm on some of them",
        "Clip or scale by one factor on all ranks: from the norm over all shards, after the reduction.",
    ),
    "accumulation": (
        "gets the gradients of {backwards:.0f} backwards a step, whose losses are means over {least:.0f} to"
        " {most:.0f} elements",
        "Sum the losses, and divide by the number of elements of all backwards of the step.",
    ),
    "clipping": (
        "is stepped with a gradient norm of {norm:.3g}, though it was clipped to {max_norm:.3g}",
        "Clip between the last backward (with a GradScaler: scaler.unscale_) and the step, and pass a list, not a"
        " generator that was used before.",
    ),
    "clipping:to-zero": (
        "is stepped with a gradient of 0, because its norm of {norm:.3g} was clipped to {max_norm:.3g}",
        "Skip the step where the norm is inf: clip_grad_norm_(..., error_if_nonfinite=True) raises there.",
    ),
    "clipping:below-eps": (
        "is stepped with gradients below the optimizer's eps: a norm of {norm:.3g} was clipped to {max_norm:.3g}",
        "Raise max_norm, or lower the optimizer's eps.",
    ),
    "clipping:each-backward": (
        "is clipped after each backward of a step: to {max_norm:.3g} before all gradients are there",
        "Clip once, between the last backward and the step.",
    ),
    "missing-zero-grad": (
        "is stepped with gradients of earlier steps, or of another optimizer's backward, in `.grad`",
        "Call optimizer.zero_grad() once before the backward of each step, on the optimizer that steps.",
    ),
    "not-unscaled": (
        "is used with a gradient that still has the loss scale of {scale:.0f}",
        "Call scaler.step(optimizer) in place of optimizer.step(), and scaler.unscale_(optimizer) before clipping.",
    ),
    "not-unscaled:other": (
        "gets a loss times the scale {scale:.6g}, and is stepped with its gradient divided by {divisor:.6g}",
        "Divide by the scale that the loss was multiplied by, and change the scale after the step.",
    ),
    "train-mode-wrong": (
        "is trained in evaluation mode: dropout and batch norm do not train",
        "Call model.train() after each evaluation, and after from_pretrained(), which returns a model in evaluation"
        " mode.",
    ),
    "eval-mode-wrong": (
        "is evaluated in training mode: dropout is active, and batch norm takes statistics of the evaluation",
        "Call model.eval() before the evaluation and model.train() after it.",
    ),
}


@dataclass(frozen=True, slots=True)
class UpdateFinding:
    """Step of the optimizer that did not do what was meant: see docs/updates.md.

    `step` counts the optimizer's steps from 1. `kind` is one of `KINDS`. `module` is the name of a module, "" for the
    root, and `parameter` the name of a weight in it, or None where all trained weights of the module are meant. `place`
    is `file:line` in the user's source, None where nothing points there. `batch` is the latest one before the step.
    """

    step: int
    kind: str
    module: str
    parameter: str | None
    message: str
    place: str | None
    cure: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    batch: int = -1

    def __str__(self) -> str:
        where = "" if self.place is None else f" ({self.place})"
        return f"step {self.step}: {self.message}{where}. {self.cure}"


def update_finding(
    step: int,
    kind: str,
    module: str,
    parameter: str | None,
    count: int = 1,
    numbers: Mapping[str, float] | None = None,
    place: str | None = None,
    batch: int = -1,
) -> UpdateFinding:
    """Return the finding of this kind in words. `count` weights of the module are meant."""
    numbers = dict(numbers or {})
    headline, cure = (words.format_map(numbers) for words in KINDS[kind])
    kind = kind.partition(":")[0]
    subject = module_name(module) if parameter is None else f"`{visible(parameter)}` of {module_name(module)}"
    if parameter is None and count > 1:
        subject += f" ({count} weights)"
    message = f"{kind}: {subject} {headline}"
    return UpdateFinding(step, kind, module, parameter, message, place, cure, numbers, batch)
