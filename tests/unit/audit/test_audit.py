"""Findings of the audit in trainings with one planted fault each, and none in the same training without it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch import Audit, watch
from nanwatch.report.update_finding import UpdateFinding

pytestmark = pytest.mark.filterwarnings("ignore:the optimizer's step", "ignore:.*more finding")


class Detach(nn.Module):
    """Cuts off what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().relu()


class Training:
    """A classifier in plain torch. A fault replaces one of its parts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)
        )
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


def _bfloat16(one: Training) -> None:
    one.model.bfloat16()
    one.x = one.x.bfloat16()
    one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=1e-6)


def _frozen_late(one: Training) -> None:
    one.optimizer = torch.optim.SGD(one.model.parameters(), lr=0.1, momentum=0.9)
    one.model(one.x).sum().backward()
    one.optimizer.step()
    one.model[4].requires_grad_(False)
    one.optimizer.zero_grad(set_to_none=False)
    one.put(zero=lambda: one.optimizer.zero_grad(set_to_none=False))


def _clip_nothing(one: Training) -> None:
    parameters = one.model.parameters()
    list(parameters)
    one.factor = 100.0
    one.put(before_step=lambda: nn.utils.clip_grad_norm_(parameters, 0.1))


def _unequal_means(one: Training) -> None:
    """Every other micro-batch has a quarter of the labels."""
    one.backwards, one.factor, whole, part = 2, 0.5, one.y, one.y.clone()
    part[8:] = -100

    def forward() -> Tensor:
        one.y = part if one.y is whole else whole
        return one.model(one.x)

    one.put(forward=forward)


def _all_frozen(one: Training) -> None:
    one.model.requires_grad_(False)
    one.put(forward=lambda: one.model(one.x).requires_grad_())


def _evaluated_in_training_mode(one: Training) -> None:
    def validate() -> None:
        with torch.no_grad():
            for x in one.x.chunk(3):
                one.model(x)

    one.put(after_step=validate)


def _frozen_norm(one: Training) -> None:
    one.model[1].requires_grad_(False)
    one.optimizer = torch.optim.AdamW([x for x in one.model.parameters() if x.requires_grad], lr=1e-3)


def _compiled(one: Training) -> None:
    one.model = nn.Sequential(one.model[0], Detach(), one.model[4])
    compiled = torch.compile(one.model, backend="aot_eager")
    one.put(forward=lambda: compiled(one.x))


def _closure(one: Training) -> None:
    """L-BFGS calls its closure again and again, and holds the head alone."""
    one.optimizer = torch.optim.LBFGS(one.model[4].parameters(), lr=1e-3, max_iter=4)

    def closure() -> Tensor:
        one.zero()
        loss = nn.functional.cross_entropy(one.forward(), one.y)
        loss.backward()
        return loss

    one.put(step=lambda: one.optimizer.step(closure))


def _argmax(one: Training) -> None:
    one.model = nn.Sequential(nn.Linear(8, 16), nn.Embedding(16, 16), nn.Linear(16, 4))
    one.hold(one.model)
    one.put(forward=lambda: one.model[1:](one.model[0](one.x).argmax(-1)))


def _straight_through(one: Training) -> None:
    one.model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(4, 16))
    one.hold(one.model)

    def forward() -> Tensor:
        codes = one.model[0](one.x)
        return one.model[1](codes + (one.model[3](one.model[2](codes)) - codes).detach())

    one.put(forward=forward)


def _left_by_another(one: Training) -> None:
    """The backward of a generator leaves gradients in the discriminator, which is not emptied before its own."""
    generator = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(generator.parameters(), lr=1e-3)
    empty = one.optimizer.zero_grad

    def generator_steps() -> None:
        empty()
        one.model(generator(one.x)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    one.put(zero=lambda: None, after_step=generator_steps)


FAULTS: dict[str, tuple[str, str, Callable[[Training], object]]] = {
    "bfloat16": ("absorbed", "", _bfloat16),
    "detached": (
        "no-gradient",
        "0",
        lambda one: one.put(forward=lambda: one.model[4](one.model[:4](one.x).detach())),
    ),
    "masked": ("zero-gradient", "", lambda one: one.put(forward=lambda: one.model(one.x) * 0)),
    "head_alone": ("not-in-optimizer", "0", lambda one: one.hold(one.model[4])),
    "rate": ("zero-lr", "", lambda one: one.hold(one.model, lr=0.0)),
    "no_zero": ("missing-zero-grad", "", lambda one: one.put(zero=lambda: None)),
    "zero_before_step": ("no-gradient", "", lambda one: one.put(before_step=one.optimizer.zero_grad)),
    "frozen_late": ("frozen-moved", "4", _frozen_late),
    "copied": ("other-module-trained", "", lambda one: one.hold(copy.deepcopy(one.model))),
    "clip_nothing": ("clipping", "", _clip_nothing),
    "unequal_means": ("accumulation", "", _unequal_means),
    "all_frozen": ("no-gradient", "", _all_frozen),
    "evaluation_mode": ("train-mode-wrong", "", lambda one: one.model.eval()),
    "evaluated_in_training_mode": ("eval-mode-wrong", "", _evaluated_in_training_mode),
    "frozen_norm": ("frozen-moved", "1", _frozen_norm),
    "argmax": ("no-gradient", "0", _argmax),
    "straight_through": ("no-gradient", "2", _straight_through),
    "compiled": ("no-gradient", "0", _compiled),
    "closure": ("not-in-optimizer", "0", _closure),
    "evaluation_mode_later": ("train-mode-wrong", "", lambda one: one.later(lambda: one.model.eval())),
    "clipped_from_inf": ("clipping", "", lambda one: one.put(factor=1e25, before_step=lambda: one.clip(1.0))),
    "clipped_below_eps": ("clipping", "", lambda one: one.put(before_step=lambda: one.clip(1e-9))),
    "left_by_another": ("missing-zero-grad", "", _left_by_another),
}


@pytest.mark.filterwarnings("ignore:.*empty generator")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    """Kind and module of the first finding, within 10 steps, and nothing about another cause."""
    kind, module, fault = FAULTS[name]
    training = Training()
    fault(training)
    found = training.run()
    assert [(one.kind, one.module) for one in found[:1]] == [(kind, module)]
    assert {one.kind for one in found} == {kind}
    assert 0 <= found[0].step <= 10


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


def test_an_audited_training_ends_with_equal_weights() -> None:
    """Bit for bit, with and without the audit of each step."""
    audited, plain = Training(), Training()
    audited.optimizer = torch.optim.SGD(audited.model.parameters(), lr=0.1, momentum=0.9)
    plain.optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.1, momentum=0.9)
    for training, updates in ((audited, 1), (plain, False)):
        torch.manual_seed(1)
        training.run(6, updates)
    for (name, x), y in zip(
        audited.model.state_dict().items(), plain.model.state_dict().values(), strict=True
    ):
        assert torch.equal(x, y), name


def test_a_weight_that_is_meant_to_stay() -> None:
    """By the option, and by an attribute of its module, which freezes nothing."""
    told = Training().run(audit=Audit(frozen="4"))
    assert {(one.kind, one.module) for one in told} == {("frozen-moved", "4")}
    training = Training()
    training.model[0].requires_grad = False
    assert {(one.kind, one.module) for one in training.run()} == {("frozen-moved", "0")}


class Embedder(nn.Module):
    """A model of transformers without a text part, whose config all the same says that embeddings are tied."""

    config = SimpleNamespace(tie_word_embeddings=True)

    def get_output_embeddings(self) -> nn.Module:
        raise NotImplementedError("please override in the subclass")

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_the_audit_goes_on_past_a_method_that_raises_and_a_script_module() -> None:
    """It still finds the weight that should stay."""
    training = Training()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript
        scripted = torch.jit.script(nn.Linear(4, 4))
    training.model.extend([Embedder(), scripted])
    assert {(one.kind, one.module) for one in training.run(audit=Audit(frozen="4"))} >= {
        ("frozen-moved", "4")
    }
