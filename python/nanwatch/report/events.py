"""Events that a watch reports beside a finding: a step that a GradScaler skipped, ranks that differ, a weight that grew
much, and a step of the optimizer that did not do what was meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..records.record import Note
from ..util.job import spell_runs
from ..util.messages import module_name, visible
from .finding import Finding
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
        fell = "" if after is None or after == before else f" → {_spell(after)}"
        return Note("skipped_step", f"scale {_spell(before)}{fell}")


def _spell(scale: float) -> str:
    return f"{scale:.0f}" if scale.is_integer() and scale < 1e15 else f"{scale:g}"


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
            yield Fact(
                "Grew",
                f"{magnitude} from {self.first:.3g} to {self.abs_max:.3g} since the watch began: look at the learning"
                " rate, at weight decay and at the clipping of gradients.",
            )
        if self.siblings and self.median is not None:
            yield Fact(
                "Apart",
                f"{magnitude} is {self.abs_max:.3g}, the median of the {self.num_siblings} other {self.siblings} is"
                f" {self.median:.3g}.",
            )


# Each kind with its headline and its cure. Formats take the numbers of the finding. docs/updates.md lists them. What
# follows a colon tells several forms of one kind apart.
KINDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
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
)


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
    return UpdateFinding(
        step, kind, module, parameter, f"{kind}: {subject} {headline}", place, cure, numbers, batch
    )
