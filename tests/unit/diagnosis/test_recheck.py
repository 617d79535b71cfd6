"""Calls made again: flips are told, chance and other kernels are not, and the training stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.diagnosis.recheck import Recheck, impure
from nanwatch.instrumentation.slot import wrappers

pytestmark = pytest.mark.filterwarnings("ignore:suspect of hardware")


def part_of(watch: nanwatch.Watch) -> Recheck:
    (part,) = (one for one in watch._optional if isinstance(one, Recheck))
    return part


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.GELU(), nn.Flatten(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.LayerNorm(24), nn.Linear(24, 2))


def train(model: nn.Module, batches: int = 6) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(batches):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(3, 2, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.state_dict().values(), torch.get_rng_state()]


def watched(model: nn.Module, every: int = 1) -> nanwatch.Watch:
    return nanwatch.watch(model, recheck=every, black_box=False, on_nonfinite="record")


def test_a_healthy_training_is_bit_equal_and_says_nothing() -> None:
    """Under autocast, with chance and running statistics, and every call of a pure layer made again."""
    plain = train(network())
    model = network()
    with watched(model) as watch:
        seen = train(model)
        recheck: Any = part_of(watch)
        assert recheck.num_made == 4 * 4  # of 6 batches without the first two
        assert set(recheck.skipped) == {"1", "3", "4"}
    assert all(map(torch.equal, plain, seen))
    assert watch.hardware_suspects == ()
    assert [wrappers(module) for module in model.modules()] == [[]] * 8


class Flips:
    """Linear products, some of which have a bit flipped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: set[int], bit: int = 20) -> None:
        self.num_calls = 0
        linear = nn.functional.linear

        def flipped(*args: Any) -> Tensor:
            out = linear(*args)
            self.num_calls += 1
            if self.num_calls in calls:
                out.detach().view(torch.int32).reshape(-1)[1] ^= 1 << bit
            return out

        monkeypatch.setattr(nn.functional, "linear", flipped)


def run(model: nn.Module, batches: int = 6) -> nanwatch.Watch:
    with watched(model) as watch:
        for _ in range(batches):
            model(torch.ones(2, 3)).sum().backward()
    return watch


@pytest.mark.parametrize(("call", "batch"), [(3, 2), (5, 3)])
def test_a_flip_is_told_with_its_bit(monkeypatch: pytest.MonkeyPatch, call: int, batch: int) -> None:
    """Also in the first call that is made again, as soon as the next one is equal."""
    # Batches 0 and 1 make one call each. A flip makes one more: its second repetition.
    Flips(monkeypatch, {call})
    watch = run(nn.Sequential(nn.Linear(3, 2)))
    (suspect,) = watch.hardware_suspects
    assert (suspect.batch, suspect.module, suspect.class_name, suspect.device) == (
        batch,
        "0",
        "Linear",
        "cpu",
    )
    assert (suspect.distance.num_differing, suspect.distance.bits) == (1, (20,))


def test_a_kernel_that_differs_each_time_is_no_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it between two repetitions, or between the run's call and its repetitions."""
    Flips(monkeypatch, {4})
    chance: Any = run(nn.Sequential(nn.Linear(3, 2)))
    # With grad in the run, without in the repetitions: each call of the run differs.
    other = nn.functional.linear
    monkeypatch.setattr(
        nn.functional, "linear", lambda x, w, b: other(x, w, b) + (1.0 if torch.is_grad_enabled() else 0.0)
    )
    kernels: Any = run(nn.Sequential(nn.Linear(3, 2)))
    for watch in (chance, kernels):
        assert watch.hardware_suspects == ()
    assert list(part_of(chance).skipped) == list(part_of(kernels).skipped) == ["0"]


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(),
        nn.BatchNorm1d(2),
        nn.LSTM(2, 2),
        nn.ReLU(inplace=True),
        nn.Embedding(3, 2, max_norm=1.0),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        type("Own", (nn.Linear,), {})(2, 2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_may_change_something_is_not_called_again(module: nn.Module) -> None:
    """And has a reason."""
    assert impure(module)


def test_hooks_are_not_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a module whose calls are made again: between what they give it and what they make of its output."""
    model = nn.Sequential(nn.Linear(3, 2))
    calls: list[str] = []

    def hook(name: str, made: Callable[[Any], Any]) -> Callable[..., Any]:
        def run(module: nn.Module, x: Any, *_: Any) -> Any:
            calls.append(name)
            return made(x)

        return run

    model[0].register_forward_pre_hook(hook("before", lambda x: (x[0] * len(calls),)))
    model[0].register_forward_hook(lambda _, x, out: hook("after", lambda out: out * len(calls))(_, out))
    model[0].register_full_backward_hook(hook("backward", lambda _: None))
    Flips(monkeypatch, {5})
    watch = run(model)
    assert calls == ["before", "after", "backward"] * 6
    assert [suspect.batch for suspect in watch.hardware_suspects] == [3]
    assert part_of(watch).num_made == 4


def test_a_hook_that_raises_leaves_no_forward_behind() -> None:
    """The module is as it was."""
    model = nn.Sequential(nn.Linear(3, 2))

    def fail(module: nn.Module, args: Any) -> None:
        if len(seen) == 3:
            raise ValueError("planted")
        seen.append("forward" in vars(module))

    seen: list[bool] = []
    model[0].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="planted"):
        run(model)
    assert seen == [False, False, True]
    assert "forward" not in vars(model[0])
    assert wrappers(model[0]) == []


def test_one_in_n_calls_is_made_again() -> None:
    """Of each module in turn."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    with watched(model, every=10) as watch:
        for _ in range(22):
            model(torch.ones(1, 3))
        recheck: Any = part_of(watch)
    assert recheck.num_made == 20 * 4 // 10
