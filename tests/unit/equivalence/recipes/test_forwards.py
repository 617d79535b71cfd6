"""Runs of a model in other formats: its loss, distances of gradients, equal starts, and the file of measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.equivalence.recipes.forwards import ALL, Forwards, Outcome
from nanwatch.precision.emulation import Rounding, emulated
from nanwatch.util.progress import silent


class Trained(nn.Module):
    """Two layers, dropout and a batch norm, and a loss in one of the forms that models give."""

    def __init__(self, form: Callable[[Tensor], Any] = lambda loss: loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
        self.form = form
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        hidden = nn.functional.dropout(self.norm(self.a(x)), 0.5, self.training)
        return self.form(self.b(hidden).square().mean())


X = torch.linspace(-1, 1, 16 * 32).reshape(16, 32).sin()


def forwards(model: nn.Module, rounding: Rounding | None = None, journal: Path | None = None) -> Forwards:
    return Forwards(model, X, None, rounding or Rounding(), journal, silent)


@pytest.mark.parametrize(
    "form",
    [
        lambda loss: loss,
        lambda loss: (loss, "logits"),
        lambda loss: {"loss": loss.reshape(1)},
        lambda loss: SimpleNamespace(loss=loss),
    ],
)
def test_the_loss_is_found(form: Callable[[Tensor], Any]) -> None:
    """The loss may be the output, its first part, its item "loss" or its attribute `loss`."""
    runs, same = forwards(Trained(form).eval()), forwards(Trained().eval())
    with runs.same_start(), same.same_start():
        assert runs.as_it_is() == same.as_it_is()


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda loss: None, "got NoneType"),
        (lambda loss: loss.repeat(3), r"a tensor of shape \(3,\)"),
        (lambda loss: SimpleNamespace(loss=None, logits=loss), "got NoneType"),
        (lambda loss: loss.long(), "a tensor of shape"),
    ],
)
def test_a_batch_without_loss(form: Callable[[Tensor], Any], words: str) -> None:
    """The error says what came and what to do."""
    runs = forwards(Trained(form))
    with runs.same_start(), pytest.raises(ValueError, match=f"gives no loss.*{words}.*put labels"):
        runs.as_it_is()


def test_runs_start_alike_and_leave_nothing() -> None:
    """Dropout and running statistics are those of the first run in each; random numbers and buffers are put back."""
    model = Trained().train()
    before, random_state = {n: x.clone() for n, x in model.state_dict().items()}, torch.get_rng_state()
    runs = forwards(model, Rounding(backward=True))
    with runs.same_start():
        outcome, floor = runs.as_it_is()
    assert floor == 0.0
    assert outcome.gradients[ALL] == (0.0, 1.0)
    assert runs.multiplications == {"a": 16 * 32 * 64, "b": 16 * 64 * 8}
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.a.weight.grad is None


def test_distances_of_gradients() -> None:
    """Relative error and cosine of each weight's gradient, and of all weights as one vector."""
    model, formats = Trained().eval(), {"a": "mxfp4", "b": "mxfp4"}
    plain = torch.autograd.grad(model(X), [model.a.weight, model.b.weight])
    with emulated(model, formats, Rounding(backward=True)):
        other = torch.autograd.grad(model(X), [model.a.weight, model.b.weight])
    runs = forwards(model, Rounding(backward=True))
    with runs.same_start():
        runs.as_it_is()
        outcome = runs.outcome(formats)
        assert outcome.gradients.keys() == {ALL, "a", "b"}
        assert runs.outcome({"a": "mxfp4"}).gradients.keys() == {ALL}
    whole = [torch.cat([x.flatten() for x in one]) for one in (other, plain)]
    for name, x, y in (("a", other[0], plain[0]), ("b", other[1], plain[1]), (ALL, whole[0], whole[1])):
        cosine = torch.cosine_similarity(x.flatten(), y.flatten(), dim=0)
        expected = float((x - y).norm() / y.norm()), float(cosine)
        assert outcome.gradients[name] == pytest.approx(expected, rel=1e-4)


def test_a_file_of_measurements_serves_the_same_question_alone(tmp_path: Path) -> None:
    """Another process takes them from there; other weights, modes or options do not. Half a line is cut off."""
    journal = tmp_path / "measured.jsonl"

    def ask(model: Trained, rounding: Rounding | None = None) -> tuple[int, Outcome]:
        runs = forwards(model, rounding, journal)
        with runs.same_start():
            outcome = runs.outcome({"a": "mxfp4"})
        return model.calls, outcome

    model = Trained().eval()
    first = ask(model)
    assert first[0] == 1
    with journal.open("a") as file:
        file.write('{"key": "killed he')
    assert ask(Trained().eval()) == (0, first[1])
    assert len(journal.read_text().splitlines()) == 1
    assert ask(Trained().train())[0] == 1
    assert ask(Trained().eval(), Rounding(hadamard=16))[0] == 1
    other = Trained().eval()
    with torch.no_grad():
        other.b.bias[3] += 1e-3
    assert ask(other)[0] == 1
    losses = [json.loads(line)["loss"] for line in journal.read_text().splitlines()]
    assert losses[0] == first[1].loss


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    """The error names the file and the line."""
    journal = tmp_path / "notes.txt"
    journal.write_text("my notes\n")
    with pytest.raises(ValueError, match=r"notes\.txt, line 1: no measurement"):
        forwards(Trained(), journal=journal)
    assert journal.read_text() == "my notes\n"


def test_training_needs_a_gradient() -> None:
    """A frozen model is refused."""
    with pytest.raises(ValueError, match="no weight of a linear layer requires one"):
        forwards(Trained().requires_grad_(False), Rounding(backward=True))
