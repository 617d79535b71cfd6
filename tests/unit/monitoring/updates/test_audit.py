"""Findings of the audit in trainings with one planted fault each, and none in the same training without it."""

from __future__ import annotations

import copy
import itertools
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
        self.is_clipped_each = False

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
                    if self.is_clipped_each:
                        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
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


def _no_step(one: Training) -> None:
    one.step = lambda: None  # type: ignore[method-assign]


def _no_zero(one: Training) -> None:
    one.zero = lambda: None  # type: ignore[method-assign]


def _zero_before_step(one: Training) -> None:
    one.before_step = one.optimizer.zero_grad  # type: ignore[method-assign]


def _undivided(one: Training) -> None:
    one.backwards = 4


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


def _decayed_by_hand(one: Training) -> None:
    def decay() -> None:
        with torch.no_grad():
            for x in one.model.parameters():
                x.mul_(0.999)

    one.after_step = decay  # type: ignore[method-assign]


def _sorted_wrongly(one: Training) -> None:
    matrices = [x for x in one.model.parameters() if x.ndim > 1]
    others = [x for x in one.model.parameters() if x.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1}]
    one.optimizer = torch.optim.AdamW(groups, lr=1e-3)


def _wrong_rule(one: Training) -> None:
    class SGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for x in self.param_groups[0]["params"]:
                    x.sub_(x.grad * self.param_groups[0]["lr"] * 2)

    one.optimizer = SGD(one.model.parameters(), lr=0.1)


def _clip_nothing(one: Training) -> None:
    parameters = one.model.parameters()
    list(parameters)
    one.factor = 100.0
    one.before_step = lambda: nn.utils.clip_grad_norm_(parameters, 0.1)  # type: ignore[method-assign,assignment]


def _clip_each(one: Training) -> None:
    one.backwards, one.factor, one.is_clipped_each = 2, 0.5, True


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


def _other_autocast(one: Training) -> None:
    def forward() -> Tensor:
        with torch.autocast("cuda"):
            return one.model(one.x)

    one.forward = forward  # type: ignore[method-assign]


def _frozen_norm(one: Training) -> None:
    one.model[1].requires_grad_(False)
    one.optimizer = torch.optim.AdamW([x for x in one.model.parameters() if x.requires_grad], lr=1e-3)


def _made_anew(one: Training) -> None:
    steps = itertools.count(1)

    def epoch_ends() -> None:
        if next(steps) % 2 == 0:
            one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=1e-3)

    one.after_step = epoch_ends  # type: ignore[method-assign]


class _Backup(nn.Module):
    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original, self.saved = original, copy.deepcopy(original)

    def forward(self, x: Tensor) -> Tensor:
        return self.original(x)


def _original_called(one: Training) -> None:
    one.model[4] = _Backup(one.model[4])
    one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=1e-3)


class _Wide(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


def _one_without_autocast(one: Training) -> None:
    one.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), _Wide(8, 8), nn.Tanh(), nn.Linear(8, 4))
    one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=1e-3)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return one.model(one.x)

    one.forward = forward  # type: ignore[method-assign]


class _Noisy(nn.Linear):
    dropout: float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), self.dropout)


def _dropout_in_evaluation(one: Training) -> None:
    one.model[0] = _Noisy(8, 16)
    vars(one.model[0])["dropout"] = 0.1
    one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=1e-3)

    def validate() -> None:
        one.model.eval()
        with torch.no_grad():
            one.model(one.x)
        one.model.train()

    one.after_step = validate  # type: ignore[method-assign]


def _moments_in_16_bits(one: Training) -> None:
    one.factor = 200.0

    def store() -> None:
        one.factor = 1.0
        for state in one.optimizer.state.values():
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())

    one.after_step = store  # type: ignore[method-assign]


class _RoundingAdamW(torch.optim.AdamW):
    """Rounds the decay to the nearest bfloat16, and the update at random."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        wide = [x.detach().float().requires_grad_() for x in group["params"]]
        inner = torch.optim.AdamW(wide, lr=group["lr"], weight_decay=0.0)
        for x, y in zip(group["params"], wide, strict=True):
            y.grad, inner.state[y] = x.grad.float(), self.state[x]
        inner.step()
        for x, y in zip(group["params"], wide, strict=True):
            self.state[x] = inner.state[y]
            noise = torch.randint(1 << 16, y.shape, dtype=torch.int32)
            x.data.copy_(((y.data.view(torch.int32) + noise) & -65536).view(torch.float32))


def _decay_in_16_bits(one: Training) -> None:
    one.model = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 4)).bfloat16()
    one.x = one.x.bfloat16()
    one.optimizer = _RoundingAdamW(one.model.parameters(), lr=1e-3, weight_decay=1.0)


FAULTS: list[tuple[str, str, Callable[[Training], None]]] = [
    ("absorbed", "", _bfloat16),
    ("no-gradient", "0", _detached),
    ("zero-gradient", "", _masked),
    ("not-in-optimizer", "0", _head_alone),
    ("zero-lr", "", _rate),
    ("skipped-step", "", _no_step),
    ("missing-zero-grad", "", _no_zero),
    ("no-gradient", "", _zero_before_step),
    ("accumulation", "", _undivided),
    ("frozen-moved", "4", _frozen_late),
    ("other-module-trained", "", _copied),
    ("decayed-twice", "", _decayed_by_hand),
    ("never-decayed", "0", _sorted_wrongly),
    ("wrong-update", "", _wrong_rule),
    ("clipping", "", _clip_nothing),
    ("clipping", "", _clip_each),
    ("accumulation", "", _unequal_means),
    ("no-gradient", "", _all_frozen),
    ("train-mode-wrong", "", _evaluation_mode),
    ("eval-mode-wrong", "", _evaluated_in_training_mode),
    ("frozen-moved", "1", _frozen_norm),
    ("wrong-update", "", _made_anew),
    ("other-module-trained", "4.saved", _original_called),
    ("autocast-not-applied", "2", _one_without_autocast),
    ("eval-mode-wrong", "0", _dropout_in_evaluation),
    ("absorbed", "", _moments_in_16_bits),
    ("never-decayed", "0", _decay_in_16_bits),
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


def test_a_mean_loss_divided_by_the_ranks_under_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same without DDP, whose gradients nobody averages."""
    monkeypatch.setattr("nanwatch.monitoring.updates.wrong.rank_and_world_size", lambda: (0, 2))
    training, alone = Training(), Training()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        replica = nn.parallel.DistributedDataParallel(training.model)
        told = []
        for one, forward in ((training, replica), (alone, alone.model)):
            with watch(one.model, updates=1, black_box=False) as w:
                for _ in range(4):
                    one.zero()
                    (nn.functional.cross_entropy(forward(one.x), one.y) / 2).backward()
                    one.step()
            told.append([(found.kind, found.module) for found in w.updates])
    finally:
        torch.distributed.destroy_process_group()
    assert told == [[("averaged-twice", "")], []]


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
