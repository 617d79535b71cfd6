"""Findings of the audit in trainings with one planted fault each, and none in the same training without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch import watch
from nanwatch.report.update_finding import KINDS, UpdateFinding

pytestmark = pytest.mark.filterwarnings("ignore:the optimizer's step", "ignore:.*more finding")


class Training:
    """A classifier in plain torch. A fault replaces one of its parts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)
        )
        self.x, self.y = torch.randn(32, 8), torch.randint(0, 4, (32,))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.backwards, self.factor = 1, 1.0

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

    def run(self, steps: int = 10, updates: int = 100, **options: Any) -> tuple[UpdateFinding, ...]:
        with watch(self.model, updates=updates, black_box=False, **options) as w:
            for _ in range(steps):
                self.zero()
                for _ in range(self.backwards):
                    loss = nn.functional.cross_entropy(self.forward().float(), self.y) * self.factor
                    loss.backward()
                self.before_step()
                self.step()
                self.after_step()
        return w.updates


def _bfloat16(one: Training) -> None:
    one.model.bfloat16()
    one.x = one.x.bfloat16()
    one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=1e-6)


def _detached(one: Training) -> None:
    one.forward = lambda: one.model[4](one.model[:4](one.x).detach())  # type: ignore[method-assign]


def _masked(one: Training) -> None:
    one.forward = lambda: one.model(one.x) * 0  # type: ignore[method-assign]


def _head_alone(one: Training) -> None:
    one.optimizer = torch.optim.AdamW(one.model[4].parameters(), lr=1e-3)


def _rate(one: Training) -> None:
    one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=0.0)


def _no_zero(one: Training) -> None:
    one.zero = lambda: None  # type: ignore[method-assign]


def _zero_before_step(one: Training) -> None:
    one.before_step = one.optimizer.zero_grad  # type: ignore[method-assign]


def _frozen_late(one: Training) -> None:
    one.optimizer = torch.optim.SGD(one.model.parameters(), lr=0.1, momentum=0.9)
    one.model(one.x).sum().backward()
    one.optimizer.step()
    one.model[4].requires_grad_(False)
    one.optimizer.zero_grad(set_to_none=False)
    one.zero = lambda: one.optimizer.zero_grad(set_to_none=False)  # type: ignore[method-assign]


def _copied(one: Training) -> None:
    import copy

    one.optimizer = torch.optim.AdamW(copy.deepcopy(one.model).parameters(), lr=1e-3)


def _clip_nothing(one: Training) -> None:
    parameters = one.model.parameters()
    list(parameters)
    one.factor = 100.0
    one.before_step = lambda: nn.utils.clip_grad_norm_(parameters, 0.1)  # type: ignore[method-assign,assignment]


def _unequal_means(one: Training) -> None:
    """Every other micro-batch has a quarter of the labels."""
    one.backwards, one.factor, whole, part = 2, 0.5, one.y, one.y.clone()
    part[8:] = -100

    def forward() -> Tensor:
        one.y = part if one.y is whole else whole
        return one.model(one.x)

    one.forward = forward  # type: ignore[method-assign]


def _all_frozen(one: Training) -> None:
    one.model.requires_grad_(False)
    one.forward = lambda: one.model(one.x).requires_grad_()  # type: ignore[method-assign]


def _evaluation_mode(one: Training) -> None:
    one.model.eval()


def _evaluated_in_training_mode(one: Training) -> None:
    def validate() -> None:
        with torch.no_grad():
            for _ in range(3):
                one.model(one.x)

    one.after_step = validate  # type: ignore[method-assign]


def _frozen_norm(one: Training) -> None:
    one.model[1].requires_grad_(False)
    one.optimizer = torch.optim.AdamW([x for x in one.model.parameters() if x.requires_grad], lr=1e-3)


class _Quantizer(nn.Module):
    """Hands on a code by its number, or its input by a straight-through addition: both cut off a weight."""

    def __init__(self, *, by_number: bool) -> None:
        super().__init__()
        self.encoder, self.book = nn.Linear(8, 16), nn.Linear(16, 16)
        self.table, self.decoder = nn.Embedding(16, 16), nn.Linear(16, 4)
        self.by_number = by_number

    def forward(self, x: Tensor) -> Tensor:
        codes = self.encoder(x)
        if self.by_number:
            return self.decoder(self.table(codes.argmax(-1)))
        return self.decoder(codes + (self.book(codes) - codes).detach())


def _argmax(one: Training) -> None:
    one.model = nn.Sequential(_Quantizer(by_number=True))
    one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=1e-3)


def _straight_through(one: Training) -> None:
    one.model = nn.Sequential(_Quantizer(by_number=False))
    one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=1e-3)


def _clipped_from_inf(one: Training) -> None:
    """The squares of large gradients overflow, though the gradients are finite."""
    one.factor = 1e25
    one.before_step = lambda: nn.utils.clip_grad_norm_(one.model.parameters(), 1.0)  # type: ignore[method-assign,assignment]


def _clipped_below_eps(one: Training) -> None:
    one.before_step = lambda: nn.utils.clip_grad_norm_(one.model.parameters(), 1e-9)  # type: ignore[method-assign,assignment]


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

    one.zero, one.after_step = lambda: None, generator_steps  # type: ignore[method-assign]


FAULTS: list[tuple[str, str, Callable[[Training], None]]] = [
    ("absorbed", "", _bfloat16),
    ("no-gradient", "0", _detached),
    ("zero-gradient", "", _masked),
    ("not-in-optimizer", "0", _head_alone),
    ("zero-lr", "", _rate),
    ("missing-zero-grad", "", _no_zero),
    ("no-gradient", "", _zero_before_step),
    ("frozen-moved", "4", _frozen_late),
    ("other-module-trained", "", _copied),
    ("clipping", "", _clip_nothing),
    ("accumulation", "", _unequal_means),
    ("no-gradient", "", _all_frozen),
    ("train-mode-wrong", "", _evaluation_mode),
    ("eval-mode-wrong", "", _evaluated_in_training_mode),
    ("frozen-moved", "1", _frozen_norm),
    ("no-gradient", "0.encoder", _argmax),
    ("no-gradient", "0.book", _straight_through),
    ("clipping", "", _clipped_from_inf),
    ("clipping", "", _clipped_below_eps),
    ("missing-zero-grad", "", _left_by_another),
]


@pytest.mark.filterwarnings("ignore:.*empty generator")
@pytest.mark.parametrize(("kind", "module", "fault"), FAULTS, ids=[f[2].__name__ for f in FAULTS])
def test_a_planted_fault_is_found(kind: str, module: str, fault: Callable[[Training], None]) -> None:
    """Kind and module of the first finding, within 10 steps, and nothing about another cause."""
    training = Training()
    fault(training)
    found = training.run()
    assert [(one.kind, one.module) for one in found[:1]] == [(kind, module)]
    assert {one.kind for one in found} == {kind}
    assert 0 <= found[0].step <= 10


@pytest.mark.parametrize("compiled", ["model", "layers"])
def test_a_fault_of_a_compiled_training_is_found(compiled: str) -> None:
    """Calls and backwards are gathered whatever is compiled."""
    training = Training()
    _detached(training)
    training.model = nn.Sequential(training.model[0], Detach(), training.model[4])
    model = training.model

    def step() -> None:
        training.optimizer.zero_grad()
        nn.functional.cross_entropy(call(training.x), training.y).backward()
        training.optimizer.step()

    call: Callable[..., Tensor] = model
    if compiled == "layers":
        for layer in model:
            layer.compile(backend="aot_eager")
    with watch(model, updates=100, black_box=False) as w:
        if compiled == "model":
            call = torch.compile(model, backend="aot_eager")
        for _ in range(8):
            step()
    assert [(found.kind, found.module) for found in w.updates] == [("no-gradient", "0")]


class Detach(nn.Module):
    """Cuts off what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() * 2


def test_a_step_that_calls_its_closure_again_is_audited() -> None:
    """L-BFGS over the head alone, and over all weights."""
    told = []
    for weights in (lambda one: one.model[4], lambda one: one.model):
        training = Training()
        training.optimizer = torch.optim.LBFGS(weights(training).parameters(), lr=1e-3, max_iter=4)

        def closure(training: Training = training) -> Tensor:
            training.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(training.model(training.x), training.y)
            loss.backward()
            return loss

        with watch(training.model, updates=100, black_box=False) as w:
            for _ in range(6):
                training.optimizer.step(closure)  # type: ignore[arg-type]
        told.append({(found.kind, found.module) for found in w.updates})
    assert told == [{("not-in-optimizer", "0"), ("not-in-optimizer", "1")}, set()]


@pytest.mark.parametrize(
    ("kind", "fault"), [("train-mode-wrong", "mode"), ("zero-lr", "rate"), ("no-gradient", "cut")]
)
def test_a_fault_that_begins_late_is_found_soon(kind: str, fault: str) -> None:
    """It begins at step 12, far from the next regular audit."""
    training, steps = Training(), iter(range(1, 100))

    def after_step() -> None:
        if next(steps) == 12:
            if fault == "mode":
                training.model.eval()
            elif fault == "rate":
                training.optimizer.param_groups[0]["lr"] = 0.0
            else:
                _detached(training)

    training.after_step = after_step  # type: ignore[method-assign]
    found = training.run(22)
    assert {finding.kind for finding in found} == {kind}
    assert found[0].step <= 20


def test_a_healthy_training_has_no_findings() -> None:
    """The training in which the faults are planted, audited at each step."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Training().run(20, updates=1) == ()


def test_an_audited_training_ends_with_equal_weights() -> None:
    """Bit for bit, with and without the audit of each step."""
    audited, plain = Training(), Training()
    audited.optimizer = torch.optim.SGD(audited.model.parameters(), lr=0.1, momentum=0.9)
    plain.optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    audited.run(6, updates=1)
    torch.manual_seed(1)
    with watch(plain.model, black_box=False):
        for _ in range(6):
            plain.zero()
            nn.functional.cross_entropy(plain.forward(), plain.y).backward()
            plain.step()
    for (name, x), y in zip(
        audited.model.state_dict().items(), plain.model.state_dict().values(), strict=True
    ):
        assert torch.equal(x, y), name


def test_each_kind_has_words() -> None:
    """A headline and a cure, which end as sentences do."""
    for kind, (headline, cure) in KINDS.items():
        assert kind == kind.lower()
        assert headline
        assert cure.endswith(".")


def test_a_weight_that_is_meant_to_stay() -> None:
    """By the option, and by an attribute of its module, which freezes nothing."""
    told = Training().run(frozen="4")
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
    assert {(one.kind, one.module) for one in training.run(frozen="4")} >= {("frozen-moved", "4")}
