"""Losses outside all modules, and gradients behind a backward: the operation, its line and a cure, from statements.

The line that has to be found has the name of the operation as its comment.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch import NonFiniteError, watch
from nanwatch.diagnosis.isolation import can_fork
from support.examined import comment_of
from support.toys import Does, finding_of


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    p = logits.softmax(-1).gather(-1, labels[:, None])
    return -((1 - p) ** 2 * torch.log(p)).mean()  # aten.log.default


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5)
        with torch.no_grad():
            self.head.weight.zero_().add_(torch.arange(15.0).reshape(5, 3) * 40 - 200)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(x)  # type: ignore[no-any-return]


BATCH = torch.tensor([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
LABELS = torch.tensor([0, 1, 0, 2])


@contextlib.contextmanager
def failing(model: nn.Module, *, is_marked: bool = True) -> Iterator[tuple[SimpleNamespace, Any]]:
    """Watch the model in the block, which has to fail at a step, by the line that is marked, if there is one."""
    failure = SimpleNamespace()
    with pytest.raises(NonFiniteError) as error, watch(model, gradients=True):
        yield failure, torch.optim.SGD(model.parameters(), lr=0.1)
    failure.finding = finding_of(error)
    assert not is_marked or comment_of(failure.finding) == failure.finding.operation


def test_a_cure_of_the_script_s_own_line() -> None:
    """It is tried on the statements themselves, in a loop, under autocast and with a scaler; nothing is done twice."""
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=2.0)
    data = iter([(BATCH, LABELS == 0), (BATCH, LABELS == 7), (BATCH, LABELS == 0)])
    seen: list[Tensor] = []
    weights = model.head.weight
    with failing(model) as (failure, optimizer):
        for x, kept in data:
            logits = model(x)
            logits = logits.float() / 1000
            with torch.autocast("cpu", enabled=False):
                losses = logits.square().mean(-1)
                mean = (losses * kept).sum() / kept.sum()  # aten.div.Tensor
            seen.append(mean.detach())
            scaler.scale(mean).backward()
            held = weights.detach().clone(), torch.get_rng_state()
            optimizer.step()
            optimizer.zero_grad()
    (cure,) = failure.finding.cures
    assert cure.works
    assert "kept.sum().clamp(min=1)" in cure.patch
    # The batch of the failure, and nothing behind it.
    assert (len(seen), len(list(data))) == (2, 1)
    assert all(torch.equal(a, b) for a, b in zip(held, (weights, torch.get_rng_state()), strict=True))


def test_a_bad_target_without_a_graph_is_followed() -> None:
    """To the operation that made it, without a forward, as in a loss whose targets are detached outputs."""
    with failing(model := Net()) as (failure, optimizer):
        logits = model(BATCH)
        weights = torch.exp(logits.detach().abs() + 100)  # aten.exp.default
        target = weights / weights.sum()
        loss: Unknown = (target * logits).sum()  # type: ignore[name-defined]  # noqa: F821 - never evaluated
        loss.backward()
        optimizer.step()
    assert (bool(failure.finding.operands), model.calls) == (True, 1)


class Router(nn.Linear):
    """Two experts; what balances them is an attribute, and the mean of an expert that nobody chose is nan."""

    balance: Any = None

    def forward(self, x: Tensor) -> Tensor:
        p = super().forward(x).softmax(-1)
        chosen = p.argmax(-1) == 1
        self.balance = p[chosen, 1].mean()  # aten.mean.default
        return x * p.amax(-1, keepdim=True)


@pytest.mark.parametrize("labels", [torch.tensor([[0.0], [0.0], [torch.nan], [0.0]])])
def test_labels_that_are_bad_are_data(labels: Tensor) -> None:
    model, x = nn.Linear(3, 1), BATCH
    with failing(model, is_marked=False) as (failure, optimizer):
        loss = ((model(x) - labels) ** 2).mean()
        loss.backward()
        optimizer.step()
    finding = failure.finding
    assert (finding.origin, finding.is_of_loss, finding.samples) == ("data", True, (2,))
    assert "`labels` came in with 1 nan: one element" in finding.remarks


def test_a_change_in_place_before_the_call_is_not_made_again() -> None:
    """Data would be drawn anew for it, and weights be changed twice."""
    torch.manual_seed(2)
    x = torch.randn(4, 3)
    x[1] *= 1e4
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.bias += 2
    with failing(model) as (failure, optimizer):
        values = model(x)
        apart = values - values.max()
        loss = torch.log(apart).sum()  # aten.log.default
        loss.backward()
        optimizer.step()
    (operand,) = failure.finding.operands
    assert (operand.abs_min, operand.abs_max) == (0, apart.abs().max())


def test_a_loss_that_a_module_keeps_beside_its_outputs() -> None:
    """It leads to the line in the module's forward and to a cure; the loss was nan, so nothing was left out of it."""
    model = nn.Sequential(Router(3, 2), Net())
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([100.0, 0.0]))
    with failing(model) as (failure, optimizer):
        logits = model(BATCH)
        loss = logits.square().mean() * model[0].balance
        loss.backward()
        optimizer.step()
    assert failure.finding.is_of_loss
    assert "it was made in the forward of `0`" in failure.finding.remarks
    assert not any("left out of the result" in remark for remark in failure.finding.remarks)
    assert failure.finding.cures[0].works


def test_a_policy_whose_distribution_holds_a_graph() -> None:
    """It is made again, as its graph is gone; the backward is one of several statements of its line."""
    model, rewards = Net(), torch.ones(4)
    with failing(model) as (failure, optimizer):
        policy = torch.distributions.Categorical(logits=model(BATCH))
        actions = policy.sample()
        advantages = (rewards - rewards.mean()) / rewards.std()  # aten.div.Tensor
        loss = -(policy.log_prob(actions) * advantages).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()  # fmt: skip  # noqa: E702
    assert failure.finding.cures[0].works


def test_log_probabilities_of_earlier_calls_whose_graphs_are_freed() -> None:
    """The backward cannot run again. The loss can, which is what fails."""
    model, kept = Net(), SimpleNamespace(parts=[])
    with failing(model) as (failure, optimizer):
        kept.parts.append(torch.log_softmax(model(BATCH[:1]), -1)[0, 0])

        def finish() -> None:
            returns = torch.ones(len(kept.parts))
            returns = (returns - returns.mean()) / (returns.std() + 1e-8)  # aten.std.correction
            loss = -(torch.stack(kept.parts) * returns).sum()
            loss.backward()
            optimizer.step()

        finish()
    (cure,) = failure.finding.cures
    assert cure.effect.endswith("the backward was not tried, as its graph is freed")


def test_a_random_change_of_the_data_before_the_call() -> None:
    """The re-run draws other numbers: other rows become nan, on the same line."""
    torch.manual_seed(1)
    with failing(model := nn.Linear(3, 1)) as (failure, _):
        x = torch.linspace(-1.0, 1.0, 96).view(32, 3)
        x = torch.where(torch.rand(32, 1) < 0.5, x**0.5, x)  # aten.pow.Tensor_Scalar
        model(x)
    assert any("random numbers" in remark for remark in failure.finding.remarks)


def score() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def test_a_loss_that_differentiates_a_model_whose_weights_were_written() -> None:
    """The model is not made anew, by which its units would live: the penalty's root fails at a gradient of zero."""
    with failing(model := score()) as (_, optimizer):
        for step in range(2):
            if step == 0:
                with torch.no_grad():
                    model[0].bias.fill_(-100.0)
            x = BATCH.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            loss = (slope.square().sum(-1) + 1 - step).sqrt().mean()  # SqrtBackward0
            loss.backward()
            optimizer.step()


def test_a_loss_that_takes_gradients_itself_is_compared_with_float64() -> None:
    """An adaptive weight of two losses divides by the norm of a gradient, which is 0."""
    with failing(model := score(), is_marked=False) as (failure, optimizer):
        out = model(BATCH)
        first, second = out.square().mean(), out.clamp(max=-100.0).mean()
        grad = partial(torch.autograd.grad, inputs=model[2].weight, retain_graph=True)
        norms = [grad(x)[0].norm() for x in (first, second)]
        loss = first + norms[0] / norms[1] * (second + 100)
        loss.backward()
        optimizer.step()
    cure = failure.finding.cures[0]  # else "not compared with float64"
    assert (cure.works, cure.effect) == (True, "as it is, it fails in float64 too")


@pytest.mark.parametrize(("num_drawn", "is_before"), [(12, False), (0, True)])
def test_a_loss_draws_as_it_did(num_drawn: int, is_before: bool) -> None:
    """From the state of the model's call where data was drawn since the last step, and before the call from the step's.

    Only the number of this run makes the value.
    """
    model = Net()
    torch.manual_seed(1)
    torch.rand(num_drawn)
    pole = torch.rand(())
    with failing(model) as (_, optimizer):
        torch.manual_seed(1)
        optimizer.step()
        torch.rand(num_drawn)
        draw = torch.rand(()) if is_before else None
        logits = model(BATCH)
        draw = torch.rand(()) if draw is None else draw
        loss = logits.mean() * torch.log((draw - pole).abs())  # aten.log.default
        loss.backward()
        optimizer.step()


def test_parts_of_a_loss() -> None:
    """A list, a sum in a loop and a dict that is filled are made anew, also in a `try`; a dict of others is left."""
    for way in ("list", "loop", "try", "dict", "alias"):
        mine: dict[str, Tensor] = {}
        with failing(model := Net()) as (_, optimizer):
            losses = mine if way == "alias" else dict[str, Tensor]()
            if way == "list":
                parts = [focal(model(BATCH[[i]]), LABELS[[i]]) for i in range(2)]
                loss = torch.stack(parts).sum()
            elif way == "try":
                try:
                    logits = model(BATCH)
                    loss = focal(logits, LABELS)
                except RuntimeError:
                    raise AssertionError from None
            elif way == "loop":
                loss = torch.zeros(())
                for i in range(2):
                    logits = model(BATCH[[i]])
                    part = focal(logits, LABELS[[i]])
                    loss = loss + part
            else:
                losses["focal"] = focal(model(BATCH), LABELS)
                first = mine.get("focal")
                loss = sum(losses.values(), torch.zeros(()))
            loss.backward()
            optimizer.step()
        assert mine.get("focal") is (first if way == "alias" else None)


@pytest.mark.parametrize("way", ["next", "append", "loop", "augmented", "direct"])
def test_what_may_not_run_twice_is_not_run(way: str) -> None:
    """Data, lists and tensors of the program stay as they are; the finding says why it has no line."""
    model = Net()
    left, total = iter([0.0, 1.0, 2.0]), torch.zeros(())
    kept: list[Tensor] = []
    with failing(model, is_marked=False) as (failure, optimizer):
        logits = model(BATCH)
        loss = logits.sum()
        if way == "next":
            loss = logits.sum() / next(left)
        elif way == "append":
            kept.append(loss / 0)
            loss = kept[0]
        elif way == "loop":
            for value in left:
                loss = logits.sum() / value
                break
        elif way == "augmented":
            total += 1
            loss = loss / (total - 1)
        if way == "direct":
            (loss / next(left)).backward()
        else:
            loss.backward()
        optimizer.step()
    is_refused = way not in ("augmented", "append")
    assert list(left) == ([1.0, 2.0] if is_refused else [0.0, 1.0, 2.0])
    assert (len(kept), float(total)) == (way == "append", way == "augmented")
    words = "should not run a second time; put the loss"
    assert is_refused == (words in "".join(failure.finding.remarks)) == (failure.finding.source is None)


def test_the_samples_of_a_batch_that_an_attribute_holds() -> None:
    """They are those of the model's outputs, as nothing that the loss reads could be cut."""
    model, inputs = Net(), SimpleNamespace(x=BATCH * torch.tensor([1.0, 1.0, 0.0, 1.0])[:, None])
    with torch.no_grad():
        model.head.bias.zero_()
    with failing(model, is_marked=False) as (failure, optimizer):
        logits = model(inputs.x)
        loss = logits.square().sum(-1).sqrt().mean()
        loss.backward()
        optimizer.step()
    assert failure.finding.samples == (2,)


def recurrent(cell: nn.Module, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state = state + 1 - cell(x).abs() * torch.tensor([0.0, 0.0, 1.0])
    return state, state


def test_a_loss_that_depends_on_a_state_of_batches_before() -> None:
    """The loop holds no state from which this batch began, so the loss runs from the outputs of the model."""
    model, state = Does(recurrent, nn.Linear(3, 3)), torch.zeros(4, 3)
    with failing(model) as (failure, optimizer):
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs, state = model(torch.ones(4, 3), state)
                loss = torch.log(3 - outputs).sum()  # aten.log.default
            loss.backward()
            state = state.detach()
        optimizer.step()
    effects = [cure.effect for cure in failure.finding.cures if cure.works]
    assert effects == ["as it is, it fails in float64 too"]


@pytest.mark.parametrize("trains", [False, True])
def test_a_re_run_in_this_process_leaves_what_the_loss_calls(monkeypatch: Any, trains: bool) -> None:
    """Buffers, gradients and random states that only the closure of the loss holds are those of one run.

    No watch sees another.
    """
    monkeypatch.setenv("NANWATCH_RERUN", "in-process")
    model, critic = Net(), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1))
    generator = torch.Generator().manual_seed(1)

    def judge(logits: Tensor) -> Tensor:
        if trains:
            critic(logits.detach()).sum().backward()
        return critic(logits + torch.rand(4, 5, generator=generator)).mean()  # type: ignore[no-any-return]

    with watch(critic) as watched, failing(model, is_marked=False) as (failure, optimizer):
        logits = model(BATCH)
        loss = judge(logits) + logits.mul(0).sum().sqrt()
        loss.backward()
        norm, drawn = [x.clone() for x in critic[0].buffers()], generator.get_state()
        gradients = [None if p.grad is None else p.grad.clone() for p in critic.parameters()]
        optimizer.step()
    assert failure.finding.operation == (None if trains else "SqrtBackward0")
    assert all(map(torch.equal, (*norm, drawn), (*critic[0].buffers(), generator.get_state())))
    for before, parameter in zip(gradients, critic.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, before, rtol=0, atol=0)
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert {frame.batch for frame in watched.report().frames} == set(range(1 + trains))


def test_gradients_that_became_bad_behind_the_backward() -> None:
    """The lines between which they did are named, and no step is taken."""
    model = Net()
    weight = model.head.weight.detach().clone()
    with failing(model, is_marked=False) as (failure, optimizer):
        model(BATCH).mean().backward()
        model.head.weight.grad.div_(0)  # type: ignore[union-attr]
        optimizer.step()
    (remark,) = failure.finding.remarks
    line = test_gradients_that_became_bad_behind_the_backward.__code__.co_firstlineno + 5
    assert f"between the backward() at line {line} and the step at line {line + 2} of" in remark
    assert torch.equal(weight, model.head.weight)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="it does not know where in its line a call is")
@pytest.mark.parametrize("way", ["function", "raises", "loop", "unreached"])
def test_a_cure_of_a_forward_is_judged_at_the_loss_behind_it(way: str, tmp_path: Path) -> None:
    """If its backward is reached, in the function of the call or of a caller. Nothing is written on the way."""
    model, losses, total = Does(lambda part, x: part(x).exp(), nn.Linear(3, 1)), {}, torch.zeros(())
    weight = torch.tensor([[0.0, 0.0, -99.0]])  # the last sample overflows nowhere
    model.parts[0].load_state_dict({"weight": weight, "bias": torch.tensor([100.0])})

    def loss_of(x: Tensor) -> Tensor:
        scale = model(x)
        torch.save(scale, tmp_path / "saved")
        with torch.autocast("cpu", enabled=False):
            losses["exp"] = [scale.exp().mean()][way == "raises"]
        (tmp_path / "written").touch()
        return losses["exp"]

    with failing(model, is_marked=False) as (failure, _):
        for _ in range(2):
            if way == "loop":
                scale = model(BATCH)
                (scale.detach().mean() * model.parts[0].bias).sum().backward()
                total += scale.exp().mean()
                total.backward()
            loss = loss_of(BATCH)
            (tmp_path / "printed").touch()
            if way != "unreached":
                loss.backward()
    assert ([*tmp_path.iterdir()], losses, float(total)) == ([], {}, 0)
    (cure,) = failure.finding.cures
    is_tried, effect = way in ("function", "loop"), cure.effect
    is_bound = "part(x).clamp(max=2).exp()" in cure.patch  # a larger bound is finite in the forward alone
    assert (is_bound, "was not tried" in effect) == (is_tried, not is_tried)
    assert ("as it raised IndexError" in effect) == (way == "raises")


@pytest.mark.skipif(not can_fork(), reason="in this process all is written again")
def test_a_loss_leaves_the_files_of_one_run(tmp_path: Path) -> None:
    """Though each trial runs it whole: it appends, overwrites, and reads a scratch file."""
    model, log = Net(), tmp_path / "log"

    def logged(logits: Tensor) -> Tensor:
        with open(log, "a") as file:  # by builtins, and pathlib by io
            file.write("a line")
        (tmp_path / "latest").write_text(f"{os.getpid()}")
        with tempfile.NamedTemporaryFile("w+") as scratch:
            Path(scratch.name).write_text(f"{logits.sum():e}")
            return focal(logits + 0 * float(scratch.read()), LABELS)

    with failing(model) as (failure, optimizer):
        loss = logged(model(BATCH))
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        loss.backward()
        optimizer.step()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert failure.finding.cures[0].works


def test_what_is_read_without_its_graph_is_not_made_again() -> None:
    """A discriminator gets the images that it got, whose noise was drawn where no random state is known."""
    generator = nn.Linear(3, 3)
    with failing(model := Net()) as (failure, optimizer):
        fake = generator(torch.rand(4, 3))
        apart = fake.max().item() - fake.detach()
        loss = torch.log(apart).mean() + model(fake.detach()).mean()  # aten.log.default
        loss.backward()
        optimizer.step()
    assert failure.finding.operands[0].abs_min == 0


def scaled(rows: Tensor) -> Tensor:
    return rows / rows.amax(1, keepdim=True)  # aten.div.Tensor


def trained(model: nn.Module, x: Tensor, *, labels: Tensor) -> Tensor:
    x = x.float()
    logits = model(x)
    loss = (logits - x.sum(1, keepdim=True)).square().mean() + 0 * labels.sum()
    loss.backward()
    return loss.detach()


def epoch(model: nn.Module, data: Iterator[Tensor]) -> Tensor:
    total = torch.zeros(())
    for rows in data:
        x = scaled(rows)
        total = total + trained(model, x, labels=LABELS)
    return total


SCALED_TO_NAN = BATCH * torch.tensor([1.0, 1.0, 0.0, 1.0])[:, None]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="it does not know where in its line a call is")
@pytest.mark.parametrize("way", ["inline", "helper", "caller", "keywords", "alone"])
def test_an_argument_that_statements_before_the_call_made(way: str) -> None:
    """In the function of the call or of a caller: the line and a cure, tried up to the loss, which reads it too."""
    model, data = Does(lambda part, x, mask=None: part(x), Net()), iter([BATCH, SCALED_TO_NAN, BATCH])
    with failing(model) as (failure, optimizer):
        if way == "caller":
            epoch(model, data)
        for rows in data:
            x = rows if way == "helper" else rows / rows.amax(1, keepdim=True)  # aten.div.Tensor
            if way == "alone":
                model(x)
            else:
                batch = {
                    name: scaled(y) if name == "x" else y for name, y in (("x", rows), ("mask", rows > 0))
                }
                logits = (
                    model(x) if way == "inline" else model(**batch) if way == "keywords" else model(scaled(x))
                )
                loss = (logits - torch.nan_to_num(x).sum()).square().mean()
                loss.backward()
            optimizer.step()
    (cure,), finding = failure.finding.cures, failure.finding
    assert (finding.origin, finding.samples, len(list(data))) == ("received", (2,), 1)
    assert (cure.works, "was not tried" in cure.effect) == (True, way == "alone")
    assert sum(line.startswith("+ ") for line in cure.patch.splitlines()) == 1


@pytest.mark.parametrize(
    "way", ["bound anew", "in place", "data", "inf", "constant", "mask", "next", "deleted"]
)
def test_an_argument_whose_line_is_not_known_is_data(way: str) -> None:
    """The names no longer have what the statement read, or it was bad before any statement."""
    (rows,) = left = [SCALED_TO_NAN.clone()]
    rows[2] = {"data": torch.nan, "inf": torch.inf}.get(way, 0.0)
    left = iter(left)
    with failing(model := Does(lambda part, x: part(x), Net()), is_marked=False) as (failure, _):
        for x in (rows.clone(),):
            if way == "bound anew":
                x = x / x.amax(1, keepdim=True)
            elif way == "in place":
                x /= x.amax(1, keepdim=True)
            elif way == "next":
                x = torch.log(next(left))
            elif way == "constant":
                y = torch.where(x == 0, torch.tensor(torch.nan), x)
            elif way == "mask":
                y = (x != 0).float().log()
            else:
                y = x / x.amax(1, keepdim=True)
                del x
            model(x if way in ("bound anew", "in place", "next") else y)
    assert (failure.finding.origin, failure.finding.cures) == ("data", ())
    assert not any("failed" in remark for remark in failure.finding.remarks)
