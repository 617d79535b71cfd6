"""A training that `judge_spikes.py` watches, the loop that runs it, and the causes that can be planted in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.report.spike import SpikeReport

AT = 90  # the step at which a cause sets in
STEPS = 112  # of a training with a cause
JUMP = 4.0  # a loss or gradient norm that is so many times its median before has jumped,
LEAST = 0.02  # if it is at least this share of the first one
LASTS = 8  # steps in which a cause has its effect; later jumps are noise

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass
class Training:
    """A model, the batches of its steps, and the losses and optimizers of a step: one pair, for a GAN two."""

    model: nn.Module
    draw: Callable[[int], Batch]
    phases: Sequence[tuple[Loss, torch.optim.Optimizer]]
    finds_loss: bool = False  # the model returns its loss
    factor: float = 1.0  # of the loss, outside the model
    batch: Batch = field(default_factory=dict)
    before_steps: list[Callable[[], None]] = field(
        default_factory=list
    )  # called once, after the next backward
    notes: dict[str, Any] = field(default_factory=dict)  # of a plant

    @property
    def groups(self) -> Iterator[dict[str, Any]]:
        """The groups of parameters of all optimizers."""
        for _, optimizer in self.phases:
            yield from optimizer.param_groups


Plant = Callable[[Training, int], None]


class Step(NamedTuple):
    """The batches that a step made, its losses, and the norm of the gradients of each loss."""

    batches: range
    losses: list[float]
    norms: list[float]


class Outcome(NamedTuple):
    """The steps of a training and the spikes that were reported."""

    steps: list[Step]
    spikes: tuple[SpikeReport, ...]

    def step_of(self, spike: SpikeReport) -> int:
        """Return the step that made the batch of a spike."""
        return next(i for i, step in enumerate(self.steps) if spike.batch in step.batches)

    def jump(self, since: int = AT) -> tuple[int, float] | None:
        """Return the first step from `since` on whose loss has jumped, else the norm, and how many times it is."""
        for kind in ("losses", "norms"):
            before = [getattr(one, kind) for one in self.steps[since - 16 : since]]
            usual = [median(phase) for phase in zip(*before, strict=True)]
            for number in range(since, min(since + LASTS, len(self.steps))):
                values = getattr(self.steps[number], kind)
                least = [LEAST * x for x in getattr(self.steps[0], kind)]
                factor = max(
                    x / max(y, 1e-9) * (x >= z) for x, y, z in zip(values, usual, least, strict=True)
                )
                if factor >= JUMP:
                    return number, factor
        return None


def run(
    make: Callable[..., Training],
    plant: Plant | None = None,
    *,
    steps: int = STEPS,
    seed: int = 0,
    schedule: Callable[[int], float] = lambda step: 1.0,
    evaluates: bool = False,
    scales: bool = False,
    accumulates: int = 1,
    clips: float = 0.0,
    **options: Any,
) -> Outcome:
    """Train with spikes=True. `plant` is called before the forward of each step.

    `schedule` gives the factor of the learning rate. The others: an evaluation after every 20th step, a GradScaler
    whose scale doubles every 30 steps, several backwards for each step, and the norm that gradients are clipped to.
    """
    torch.manual_seed(seed)
    training = make()
    rates = [group["lr"] for group in training.groups]
    scaler = torch.amp.GradScaler("cpu", enabled=scales, growth_interval=30)
    done: list[Step] = []
    warnings.simplefilter("ignore")
    with nanwatch.watch(training.model, spikes=True, on_nonfinite="record", attention=1, **options) as watch:
        for step in range(steps):
            for group, lr in zip(training.groups, rates, strict=True):
                group["lr"] = lr * schedule(step)
            first, losses, norms = watch._recorder.latest_batch + 1, [], []
            for loss_of, optimizer in training.phases:
                optimizer.zero_grad()
                mean = 0.0
                for part in range(accumulates):
                    training.batch = training.draw(accumulates * step + part + 10_000 * seed)
                    if plant is not None and loss_of is training.phases[0][0]:
                        plant(training, step)
                    loss = training.factor * loss_of(training.model, training.batch)
                    if not training.finds_loss:
                        watch.note_loss(loss)
                    scaler.scale(loss.mean() / accumulates).backward()
                    mean += loss.mean().item() / accumulates
                scaler.unscale_(optimizer)
                own = [
                    x.grad for group in optimizer.param_groups for x in group["params"] if x.grad is not None
                ]
                norms.append(float(torch.nn.utils.get_total_norm(own)))
                while training.before_steps:
                    training.before_steps.pop()()
                losses.append(mean)
                if clips:
                    nn.utils.clip_grad_norm_([x for g in optimizer.param_groups for x in g["params"]], clips)
                scaler.step(optimizer)
                scaler.update()
            done.append(Step(range(first, watch._recorder.latest_batch + 1), losses, norms))
            if evaluates and step % 20 == 19:
                with torch.no_grad():
                    training.model.eval()
                    training.phases[0][0](training.model, training.draw(5_000 + step))
                    training.model.train()
        return Outcome(done, watch.spikes)


# The causes.


def at(act: Callable[[Training], None], when: int = AT) -> Plant:
    """Do this at one step."""
    return lambda training, step: act(training) if step == when else None


def scaled_batch(key: str, factor: float, *samples: int) -> Plant:
    """Scale a tensor of a batch, or only these samples of it."""

    def act(training: Training) -> None:
        x = training.batch[key] = training.batch[key].clone()
        x[list(samples) or slice(None)] *= factor

    return at(act)


def rate(factor: float, lasts: int = STEPS) -> Plant:
    """Make the learning rate so many times what the schedule says."""

    def act(training: Training, step: int) -> None:
        if AT <= step < AT + lasts:
            for group in training.groups:
                group["lr"] *= factor

    return act


def random_labels(key: str, most: int) -> Plant:
    """Draw other labels or tokens."""

    def act(training: Training) -> None:
        training.batch[key] = torch.randint(0, most, training.batch[key].shape)

    return at(act)


def shifted_labels(key: str, classes: int) -> Plant:
    """Give each sample the label of the next class."""

    def act(training: Training) -> None:
        training.batch[key] = (training.batch[key] + 1) % classes

    return at(act)


def scaled_weight(name: str, factor: float, *rows: int, when: int = AT) -> Plant:
    """Scale a weight, or only these rows of it; with the name "" all weights."""

    def act(training: Training) -> None:
        with torch.no_grad():
            if name:
                training.model.get_parameter(name)[list(rows) or ...] *= factor
            else:
                for x in training.model.parameters():
                    x *= factor

    return at(act, when)


def growing_weights(*names: str, factor: float) -> Plant:
    """Let weights grow by a factor in each step from half of AT on."""

    def act(training: Training, step: int) -> None:
        if step >= AT // 2:
            with torch.no_grad():
                for name in names:
                    training.model.get_parameter(name).mul_(factor)

    return act


def scaled_output(name: str, factor: float) -> Plant:
    def act(training: Training) -> None:
        training.model.get_submodule(name).register_forward_hook(lambda _, __, output: factor * output)

    return at(act)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradients[0], None


def scaled_gradient(name: str, factor: float) -> Plant:
    """Scale the gradient that a module gives to its input."""

    def act(training: Training) -> None:
        module = training.model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, args: (_Backward.apply(args[0], factor), *args[1:]))

    return at(act)


def scaled_loss(factor: float) -> Plant:
    def act(training: Training) -> None:
        training.factor = factor

    return at(act)


def target(factor: float) -> Plant:
    def act(training: Training) -> None:
        training.batch["y"][5] = factor

    return at(act)


def spoilt_gradients(factor: float) -> Plant:
    """Scale the gradients between a backward and the step, where no hook sees it."""

    def act(training: Training) -> None:
        def spoil() -> None:
            for group in training.groups:
                for x in group["params"]:
                    if x.grad is not None:
                        x.grad *= factor

        training.before_steps.append(spoil)

    return at(act)


def spoilt_state(key: str, factor: float) -> Plant:
    """Scale what the optimizers keep for each weight: `momentum_buffer`, `exp_avg`, `exp_avg_sq`."""

    def act(training: Training) -> None:
        for _, optimizer in training.phases:
            for state in optimizer.state.values():
                state[key].mul_(factor)

    return at(act)


def without_gradient(name: str) -> Plant:
    """Give the weights of a module zeros as gradients until AT, with Adam's second moment of short memory."""

    def act(training: Training, step: int) -> None:
        module = training.model.get_submodule(name)
        if step == 0:
            for group in training.groups:
                group["betas"] = (0.9, 0.9999)
            training.notes["closed"] = True
            for x in module.parameters():
                x.register_hook(lambda grad: torch.zeros_like(grad) if training.notes["closed"] else grad)
        if step == AT:
            training.notes["closed"] = False

    return act


def closed_until(name: str, factor: float) -> Plant:
    """Let a module return zeros until AT, and then many times its output."""

    def act(training: Training, step: int) -> None:
        if step == 0:
            training.notes["factor"] = 0.0
            module = training.model.get_submodule(name)
            module.register_forward_hook(lambda _, __, output: training.notes["factor"] * output)
        if step == AT:
            training.notes["factor"] = factor

    return act
