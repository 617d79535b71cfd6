"""Findings of the audit in trainings with one planted fault each, and none in the same training without it."""

import copy
import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch import Audit, watch
from nanwatch.report.events import UpdateFinding
from support.toys import Does

pytestmark = pytest.mark.filterwarnings("ignore:the optimizer's step")


class Training:
    """A classifier in plain torch. A fault replaces one of its parts."""

    def __init__(self) -> None:
        gc.collect()  # GradScalers of earlier trainings
        torch.manual_seed(0)
        layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)
        self.model = nn.Sequential(*layers)
        self.x, self.y = torch.randn(32, 8), torch.randint(0, 4, (32,))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.backwards, self.factor, self.steps = 1, 1.0, 0

    def put(self, **parts: Any) -> None:
        vars(self).update(parts)

    def hold(self, model: nn.Module, lr: float = 1e-3) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def clip(self, norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def later(self, change: Callable[[], object]) -> None:
        self.put(after_step=lambda: self.steps == 4 and change())

    def forward(self) -> Tensor:
        return self.model(self.x)

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def before_step(self) -> None:
        pass

    def step(self) -> None:
        self.optimizer.step()

    def after_step(self) -> None:
        pass

    def run(self, steps: int = 10, audit: Any = 100, **options: Any) -> tuple[UpdateFinding, ...]:
        with watch(self.model, audit=audit, black_box=False, **options) as w:
            for _ in range(steps):
                self.zero()
                for _ in range(self.backwards):
                    loss = nn.functional.cross_entropy(self.forward().float(), self.y) * self.factor
                    loss.backward()
                self.before_step()
                self.step()
                self.steps += 1
                self.after_step()
        return w.updates


def _bfloat16(training: Training) -> None:
    training.model.bfloat16()
    training.x = training.x.bfloat16()
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-6)


def _clip_nothing(training: Training) -> None:
    parameters = training.model.parameters()
    list(parameters)
    training.factor = 100.0
    training.put(before_step=lambda: nn.utils.clip_grad_norm_(parameters, 0.1))


def _all_frozen(training: Training) -> None:
    training.model.requires_grad_(False)
    training.put(forward=lambda: training.model(training.x).requires_grad_())


def _auxiliary_loss_detached(training: Training) -> None:
    """The model returns two outputs, of which the loss takes one."""
    training.model = Does(lambda model, head, x: (y := model(x), head(y)), training.model, nn.Linear(4, 3))
    training.hold(training.model)
    training.put(forward=lambda: training.model(training.x)[0])


def _clipped_at_each_backward(training: Training) -> None:
    """Before the last gradients are there."""
    training.backwards = 3

    def forward() -> Tensor:
        if training.model[0].weight.grad is not None:
            training.clip(0.01)
        return training.model(training.x)

    training.put(forward=forward)


def _copy_rests(training: Training) -> nn.ModuleList:
    """Call a head, though a copy of it is meant."""
    head = nn.Linear(8, 4)
    training.model = Does(lambda head, copy, x: head(x), head, copy.deepcopy(head))
    training.hold(training.model)
    return training.model.parts


def _unscaled(training: Training, growth: float, divisor: float) -> None:
    """Multiply the loss by a scale that grows at each step, and divide the gradients by a multiple of it."""
    training.factor = 1024.0

    def unscale() -> None:
        for x in training.model.parameters():
            x.grad /= divisor * training.factor
        training.factor *= growth

    training.put(before_step=unscale)


def _layers_begin_alike(training: Training) -> None:
    """Call one of two layers whose biases begin with equal values, as A_log of Mamba, and their weights do not."""
    nn.init.normal_(_copy_rests(training)[1].weight)


def _average(training: Training) -> None:
    """Write a moving average that no call uses, and that the optimizer holds."""
    head, average = _copy_rests(training)

    @torch.no_grad()
    def write() -> None:
        torch._foreach_lerp_([*average.parameters()], [*head.parameters()], 0.01)

    training.put(after_step=write)


def _target(training: Training) -> None:
    """Call the target of a Q-function without grad mode, by itself."""
    head, copied = _copy_rests(training)

    def forward() -> Tensor:
        with torch.no_grad():
            target = copied(training.x)
        return head(training.x) - target

    training.put(forward=forward)


def _rounded_states(training: Training) -> None:
    """Keep Adam's moments in bfloat16 between steps: after a spike the second one cannot decay."""

    def store() -> None:
        training.factor = 1.0
        for state in training.optimizer.state.values():
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())

    training.put(factor=30.0, after_step=store)


def _after_the_clip(training: Training, change: Callable[[Tensor], Tensor]) -> None:
    def before_step() -> None:
        training.clip(0.01)
        for x in training.model.parameters():
            x.grad.add_(change(x.grad))

    training.put(before_step=before_step)


def _second_head(training: Training) -> None:
    """Train a head that is tied to the embedding, and a further one that begins as its copy."""
    table, head = nn.Embedding(4, 8), nn.Linear(8, 4, bias=False)
    head.weight = table.weight
    draft = copy.deepcopy(head)
    training.model = nn.ModuleList([table, head, draft])
    training.put(forward=lambda: head(table(training.y)) + draft(training.x))
    training.hold(training.model)


def _scaler_steps(training: Training, scale: float = 1.0) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(1))
    training.put(step=lambda: (scaler.step(training.optimizer), scaler.update()))


def _skipped(training: Training, scale: float = 1.0) -> None:
    """A GradScaler whose scale is too small to be the reason. The finite updates do not round away."""
    _bfloat16(training)
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-6)
    _scaler_steps(training, scale)
    training.put(before_step=lambda: training.model[4].bias.grad.fill_(torch.inf))


FAULTS: dict[str, tuple[str, str, Callable[[Training], object]]] = {
    "bfloat16": ("absorbed", "", _bfloat16),
    "head_alone": ("not-in-optimizer", "0", lambda case: case.hold(case.model[4])),
    "rate": ("not-stepped", "", lambda case: case.hold(case.model, lr=0.0)),
    "no_zero": ("missing-zero-grad", "", lambda case: case.put(zero=lambda: None)),
    "zero_before_step": ("no-gradient", "", lambda case: case.put(before_step=case.optimizer.zero_grad)),
    "copied": ("other-module-trained", "", lambda case: case.hold(copy.deepcopy(case.model))),
    "clip_nothing": ("clipping", "", _clip_nothing),
    "all_frozen": ("no-gradient", "", _all_frozen),
    "evaluation_mode_later": ("train-mode-wrong", "", lambda case: case.later(lambda: case.model.eval())),
    "clip_inf": ("clipping", "", lambda case: case.put(factor=1e25, before_step=lambda: case.clip(1.0))),
    "clipped_below_eps": ("clipping", "", lambda case: case.put(before_step=lambda: case.clip(1e-9))),
    "auxiliary_loss_detached": ("no-gradient", "parts.1", _auxiliary_loss_detached),
    "clipped_at_each_backward": ("clipping", "", _clipped_at_each_backward),
    "copy_rests": ("other-module-trained", "parts.1", _copy_rests),
    "divided_by_the_next_scale": ("not-unscaled", "", lambda case: _unscaled(case, 2.0, 2.0)),
    "skipped": ("not-stepped", "", _skipped),
    "rounded_states": ("absorbed", "", _rounded_states),
    "doubled_after_the_clip": ("clipping", "", partial(_after_the_clip, change=torch.clone)),
}


@pytest.mark.filterwarnings("ignore:.*empty generator")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    kind, module, fault = FAULTS[name]
    training = Training()
    fault(training)
    findings = training.run()
    assert [(finding.kind, finding.module) for finding in findings[:1]] == [(kind, module)]
    assert {finding.kind for finding in findings} == {kind}
    assert 1 <= findings[0].step <= 10


def test_a_healthy_training_has_no_findings() -> None:
    """The training in which the faults are planted, audited at each step, with Monte Carlo dropout between steps."""
    training = Training()

    @torch.no_grad()
    def sample() -> None:
        for _ in range(3):
            training.model(training.x)

    training.put(after_step=sample)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert training.run(20, audit=1) == ()


# The scale and a number of batches; a scale that grows after the division.
NOISE = partial(_after_the_clip, change=torch.randn_like)
SCALES = [partial(_unscaled, growth=1.0, divisor=2.0), partial(_unscaled, growth=2.0, divisor=1.0)]


LOOKS_FAULTY: list[Callable[[Training], object]] = [
    lambda case: case.later(lambda: case.put(factor=0.0)),  # a hinge loss that is met
    lambda case: case.put(before_step=lambda: [case.clip(0.01), case.clip(0.01)]),
    partial(_skipped, scale=2.0**24),  # which comes down
    _scaler_steps, _average, _target, _layers_begin_alike, NOISE, _second_head, *SCALES,
]  # fmt: skip


@pytest.mark.parametrize("change", LOOKS_FAULTY)
def test_a_healthy_training_that_looks_like_a_faulty_one(change: Callable[[Training], object]) -> None:
    """Also copies that are written or called, and parts, as well as noise after a clip, and the copy of a tied head."""
    training = Training()
    change(training)
    assert training.run(12, audit=1) == ()


def test_an_audited_training_ends_with_equal_weights() -> None:
    audited, plain = Training(), Training()
    for training, updates in ((audited, 1), (plain, False)):
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(1)
        training.run(6, updates)
    torch.testing.assert_close(audited.model.state_dict(), plain.model.state_dict(), rtol=0.0, atol=0.0)


def test_a_weight_that_is_meant_to_stay() -> None:
    """By the option, and by an attribute of its module, which freezes nothing."""
    findings = Training().run(audit=Audit(frozen="4"))
    assert {(finding.kind, finding.module) for finding in findings} == {("frozen-moved", "4")}
    training = Training()
    training.hold(training.model, lr=0.0)
    assert training.run(audit=Audit(frozen="*")) == ()
    training = Training()
    training.model[0].requires_grad = False
    assert {(finding.kind, finding.module) for finding in training.run()} == {("frozen-moved", "0")}
