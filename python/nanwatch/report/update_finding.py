"""UpdateFinding: a step of the optimizer that did not do what was meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..util.visible import module_name, visible

# Each kind with its headline and its cure. Formats take the numbers of the finding. docs/updates.md lists them. What
# follows a colon tells several forms of one kind apart.
KINDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "no-gradient": (
            "gets no gradient (`.grad` is None), though its module was called",
            "Look for detach(), .data, torch.no_grad() or .item() between it and the loss, for a checkpointed block"
            " whose inputs need no gradient, and for zero_grad() between backward and step.",
        ),
        "zero-gradient": (
            "gets a gradient that is exactly 0",
            "Look for a mask or a weight of 0 in the loss, for units that are all dead (ReLU of negative values), and"
            " for zero_grad() between backward and step.",
        ),
        "not-in-optimizer": (
            "gets a gradient and is in no optimizer",
            "Make the optimizer after the last layer is in place, from model.parameters(), or add the weight with"
            " add_param_group. What is to stay frozen says requires_grad_(False).",
        ),
        "zero-lr": (
            "has the learning rate 0",
            "Print optimizer.param_groups[i]['lr'] and the scheduler's factor: an integer division or a schedule that"
            " is over gives 0.",
        ),
        "skipped-step": (
            "gets gradients, and no step moves it",
            "Call optimizer.step() after each backward. With a GradScaler look at its scale: one that always falls"
            " skips every step.",
        ),
        "compiled-step-skipped": (
            "gets gradients, and the compiled step does not move it",
            "Run the step without torch.compile, or with torch._dynamo.reset() before it, and compare.",
        ),
        "absorbed": (
            "stays as it is in {absorbed:.0%} of its elements, because their updates round away",
            "Keep the weights in float32 under torch.autocast, keep a float32 master copy, or round stochastically:"
            " {float32:.0%} of the elements would move in float32, {stochastic:.0%} a step with stochastic rounding.",
        ),
        "absorbed:moment": (
            "has a second moment that stays as it is in {absorbed:.0%} of the elements that should decay",
            "Keep the optimizer's state in float32: 16 bits round each decay away, and the steps stay too small.",
        ),
        "frozen-moved": (
            "is frozen (requires_grad=False), and the step writes it",
            "Freeze before the optimizer is made and give it only what is trained, or set .grad to None when freezing:"
            " an old gradient, momentum and weight decay go on.",
        ),
        "frozen-moved:statistics": (
            "has frozen weights, and its running statistics go on",
            "Call .eval() on the frozen part after each model.train().",
        ),
        "tie-broken": (
            "is a second copy of a weight that was tied",
            "Assign the same Parameter to both modules (model.tie_weights()), after loading and before the optimizer is"
            " made.",
        ),
        "decayed-twice": (
            "decays twice in a step",
            "Leave weight decay to one place: the optimizer's weight_decay, or the penalty of your own.",
        ),
        "never-decayed": (
            "is a matrix, and does not decay, though another group of the optimizer has weight_decay",
            "Look at the test that sorts weights into groups: `if 'bias' or 'norm' in name` is always true.",
        ),
        "never-decayed:absorbed": (
            "moves as if it had no weight decay: its share of {decay:.2g} a step rounds away in 16 bits",
            "Add the decay to the float32 update, before it is rounded.",
        ),
        "eval-mode-wrong:dropout": (
            "draws random numbers in evaluation mode",
            "Pass the dropout rate only `if self.training`: functions as scaled_dot_product_attention always use it.",
        ),
        "other-module-trained": (
            "is not trained: the optimizer holds the weights of another module of the same shapes",
            "Make the optimizer from the parameters of the model that computes the loss, after every copy, .to() of a"
            " copy, or wrapper.",
        ),
        "other-module-trained:copy": (
            "is an equal copy of the module beside it, which is called and trained in its place",
            "Call the copy, or freeze it with requires_grad_(False) if it is a backup.",
        ),
        "wrong-update:made-anew": (
            "has optimizer number {times:.0f} of the same kind, each without the state of the one before",
            "Make the optimizer once, before the loop over epochs, or load the state of the one before.",
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
        "averaged-twice": (
            "has a mean loss that is divided by the {ranks:.0f} ranks, and DDP averages the gradients over them",
            "Leave the division to DistributedDataParallel, and divide only what is logged.",
        ),
        "wrong-update": (
            "is moved by {ratio:.3g} times what the optimizer's rule gives, {error:.0%} of it wrong",
            "Compare with the plain form, foreach=False and fused=False, and look for hooks that write weights.",
        ),
        "accumulation": (
            "gets the gradients of {backwards:.0f} backwards a step, with a loss that is multiplied by {factor:.4g}",
            "Divide the loss by the number of backwards in a step, and call zero_grad() once for all of them.",
        ),
        "accumulation:of-means": (
            "gets the gradients of {backwards:.0f} backwards a step, whose losses are means over {least:.0f} to"
            " {most:.0f} elements",
            "Sum the losses, and divide by the number of elements of all backwards of the step.",
        ),
        "clipping:each-backward": (
            "is clipped {times:.0f} times a step, after each of its backwards",
            "Clip once, between the last backward and the step.",
        ),
        "clipping": (
            "is stepped with a gradient norm of {norm:.3g}, though it was clipped to {max_norm:.3g}",
            "Clip between the last backward (with a GradScaler: scaler.unscale_) and the step, and pass a list, not a"
            " generator that was used before.",
        ),
        "missing-zero-grad": (
            "is stepped with gradients of earlier steps in `.grad`",
            "Call optimizer.zero_grad() once before the backward of each step, on the optimizer that steps.",
        ),
        "not-unscaled": (
            "is used with a gradient that still has the loss scale of {scale:.0f}",
            "Call scaler.step(optimizer) in place of optimizer.step(), and scaler.unscale_(optimizer) before clipping.",
        ),
        "master-differs": (
            "no longer equals its master copy in the optimizer",
            "Copy the master to the weight after each step, and load a checkpoint into both.",
        ),
        "master-differs:at-first": (
            "was replaced at the first step by a copy in the optimizer that had other values",
            "Load a checkpoint before the optimizer copies the weights, or into both.",
        ),
        "data-order": (
            "gets the samples in the order of the epoch before, as the sampler is still at epoch {epoch:.0f}",
            "Call sampler.set_epoch(epoch) before each epoch.",
        ),
        "eval-mode-wrong:norm": (
            "is evaluated with a spectral norm that no forward has estimated, and is {ratio:.3g} times too large",
            "Make a forward in training mode first, or use torch.nn.utils.parametrizations.spectral_norm.",
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
        "autocast-not-applied": (
            "computes in float32 under autocast",
            "Enter torch.autocast with the device type of the model, in the thread that calls it.",
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
