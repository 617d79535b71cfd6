"""Changes of the source: what is told works in the file, changes nothing of the model, and hides nothing."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nanwatch import NonFiniteError, watch
from nanwatch.diagnosis.patching import patches as patches_module
from nanwatch.report.finding import Cure, Finding
from support.spy import Spy

INF, NAN = float("inf"), float("nan")


class Ratio(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = nn.functional.dropout(x, 0.5) * 0 + x
        return self.scale * x / x.sum(-1, keepdim=True)


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x.square().sum(-1))


class RootOfLess(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x.sum(-1) - 3)


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask).sum(-1)


class Infinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + INF


class Beside(nn.Module):
    """A ratio that fails, after a module whose infinities are meant and lead nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.infinite, self.ratio = Infinite(), Ratio()

    def forward(self, x: Tensor) -> Tensor:
        self.infinite(x)
        result: Tensor = self.ratio(x)
        self.infinite(x)
        return result


def failed(model: nn.Module, *args: Tensor, **options: Any) -> Finding:
    with pytest.raises(NonFiniteError) as error, watch(model, **options):
        model(*args)
    finding = error.value.report.finding
    assert finding is not None
    return finding


def works(finding: Finding) -> Cure:
    assert finding.cures, finding.remarks
    assert finding.cures[0].works
    return finding.cures[0]


def new_line(cure: Cure) -> str:
    (line,) = (one for one in cure.patch.splitlines() if one.startswith("+ "))
    return line[1:].strip()


HEALTHY_AND_ZERO = torch.tensor([[1.5, 2.0, 3.0], [0.0, 0.0, 0.0]])


def test_a_negative_whole_number_is_no_count() -> None:
    """The root of a sum that is -1 is taken of at least 0, not of at least 1, which is for counts."""
    assert new_line(works(failed(RootOfLess(), torch.ones(3, 2)))).endswith(".clamp(min=0))")


def test_the_cure_is_the_line_and_its_effect_is_counted() -> None:
    """Three of the six values are 0/0, and the others stay bit for bit."""
    cure = works(failed(Ratio(), HEALTHY_AND_ZERO))
    divisor = "x.sum(-1, keepdim=True)"
    guarded = f"torch.where({divisor}.abs() < 1e-8, 1e-8, {divisor})"
    assert new_line(cure) == f"return self.scale * x / {guarded}"
    assert cure.effect == (
        "changes 3 of 6 elements, the others bit-equal; agrees with float64, to 2.5e-08 of the largest value;"
        " float64 fails at 3 too"
    )
    assert "test_patches.py" in cure.patch
    assert cure.code == ""


class Polygamma(nn.Module):
    """Has a pole at 0, for which no change of the source is known."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.0 + torch.polygamma(1, x) * 0.5


class Reciprocals(nn.Module):
    """Gives inf where the value is hidden, too."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.polygamma(1, x).log()


@pytest.mark.parametrize("kind", [Polygamma, Reciprocals])
def test_a_change_that_hides_the_value_is_no_cure(kind: type[nn.Module]) -> None:
    """It comes last and by its name, without a patch, and only where it leaves the batch finite."""
    report = failed(kind(), torch.tensor([0.0, 1.0]))
    hiding = [cure for cure in report.cures if cure.hides]
    assert not any(cure.works or cure.patch for cure in report.cures)
    if kind is Reciprocals:
        assert hiding == []
        return
    assert hiding == [report.cures[-1]]
    words = "write `torch.polygamma(1, x).nan_to_num(0.0, 0.0, 0.0)` for `torch.polygamma(1, x)` at test_patches.py:"
    assert str(hiding[0]).startswith(f"only hides it: put 0 in place of nan and inf: {words}")


class Scaled(nn.Module):
    """Multiplies by a buffer that holds an infinity, where the other factor may be 0."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([2.0, INF]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_bad_buffer_is_told_with_the_line_that_spreads_it() -> None:
    finding = failed(Scaled(), torch.tensor([1.0, 0.0]))
    assert (finding.origin, finding.label, finding.operation) == ("buffer", "scale", "aten.mul.Tensor")
    assert new_line(works(finding)) == "return x * torch.where(x == 0, 0.0, self.scale)"
    assert works(finding).effect.startswith(
        "changes 1 of 2 elements, the others bit-equal; agrees with float64"
    )


class Norms(nn.Module):
    """Two norms that one line makes, with a positional epsilon."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width, 0.0), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_an_option_is_changed_where_the_module_is_made() -> None:
    """Only with both norms changed is the result finite, and afterwards they are as they were."""
    model = Norms()
    cure = works(failed(model, torch.tensor([[1.0, 1.0], [1.0, 2.0]])))
    made = "nn.Sequential(nn.LayerNorm(width, 1e-05), nn.Tanh())"
    assert new_line(cure) == f"self.blocks = nn.ModuleList({made} for _ in range(2))"
    assert {block[0].eps for block in model.blocks} == {0.0}


def test_an_option_is_set_where_nobody_knows_what_made_the_module() -> None:
    model = nn.Sequential(nn.LayerNorm(2, eps=0.0))
    cure = works(failed(model, torch.ones(1, 2)))
    assert "`model[0].eps = 1e-05`" in cure.what
    assert not cure.patch


def test_healthy_negative_values_forbid_a_clamp() -> None:
    """A lower limit would change them, so the divisor is replaced where it is small."""
    cure = works(failed(Ratio(), torch.cat([HEALTHY_AND_ZERO, -HEALTHY_AND_ZERO])))
    assert "clamp" not in new_line(cure)
    assert ".abs() < 1e-8, 1e-8" in new_line(cure)
    assert cure.effect.startswith("changes 6 of 12 elements, the others bit-equal; agrees with float64")


def state() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


class Log(nn.Module):
    def forward(self, p: Tensor) -> Tensor:
        return p.log()


class Added(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x) + INF * x


def test_changes_that_were_not_enough_are_named_with_the_reason() -> None:
    """A clamp that moves a finite logarithm by more than half of it, and one that does not end the failure."""
    p = torch.tensor([0.0, 1e-30, 0.5])
    finding = failed(Log(), p)
    tried = [f"`p.clamp(min={least})`" for least in ("1e-12", "1e-8", "1e-6")]
    moved = p[1].clamp(min=1e-12).log() - p[1].log()
    assert not any(cure.works for cure in finding.cures)
    assert finding.remarks[-1] == (
        f"these changes of the source were tried, and none was enough: {', '.join(tried)}; with {tried[0]} the batch"
        f" is finite, but that changes 2 of 3 elements, finite ones by at most {moved:.1e}, of values up to 6.9e+01;"
        " moves 1 of 2 elements that float64 gives as finite: -69.1 becomes -27.6; float64 fails at 1 too"
    )
    (remark,) = (one for one in failed(Added(), torch.zeros(2)).remarks if "tried" in one)
    assert ", `x.clamp(min=0)`, `x.clamp(min=1e-12)`" in remark
    assert "the batch is finite" not in remark


def test_the_model_and_the_random_states_are_left_as_they_were() -> None:
    """Weights, buffers, gradients, code and random states, and at most eight forwards more."""
    model = Ratio()
    model.scale.grad = torch.full((1,), 3.0)
    code = Ratio.forward.__code__
    calls = Spy()
    model.register_forward_pre_hook(lambda *_: calls.add())
    before: list[Any] = []

    def keep(*_: Any) -> None:
        before[:] = [copy.deepcopy(model.state_dict()), *state()]

    # Before the failing forward draws: the re-runs begin from there, and end where it ended.
    torch.manual_seed(0)
    nn.functional.dropout(HEALTHY_AND_ZERO, 0.5)
    keep()
    torch.manual_seed(0)
    finding = failed(model, HEALTHY_AND_ZERO)
    assert works(finding)
    assert state() == before[1:]
    assert model.seen.item() == 1
    assert model.scale.grad is not None
    assert model.scale.grad.item() == 3
    assert model.scale.item() == 1
    assert Ratio.forward.__code__ is code
    assert 1 < len(calls.values) <= 9


def test_infinities_that_are_meant_lose_no_cure() -> None:
    """`allow_inf` says so for the watch, and so for the trials."""
    cure = works(failed(Beside(), HEALTHY_AND_ZERO, allow_inf="infinite"))
    assert ".abs() < 1e-8, 1e-8" in new_line(cure)


def test_bad_data_behind_a_mask_names_the_product() -> None:
    """The operation that turns a given infinity into nan is named, and masked."""
    x, mask = torch.tensor([[1.0, INF], [2.0, 3.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    finding = failed(Masked(), x, mask)
    assert (finding.origin, finding.operation) == ("data", "aten.mul.Tensor")
    assert new_line(works(finding)) == "return (torch.where(mask == 0, 0.0, x) * mask).sum(-1)"


def backward_of(model: nn.Module, x: Tensor) -> Finding:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, gradients=True):
        model(x).sum().backward()
        with pytest.raises(NonFiniteError) as error:
            optimizer.step()
    finding = error.value.report.finding
    assert finding is not None
    return finding


def test_a_gradient_is_cured_in_its_forward_line() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Root())
    cure = works(backward_of(model, HEALTHY_AND_ZERO))
    assert new_line(cure) == "return torch.linalg.vector_norm(x, dim=-1)"
    assert cure.effect.startswith("leaves all 2 elements bit-equal; agrees with float64")


class LeftOut(nn.Module):
    """A branch that `where` leaves out: its nan comes from a line above the one whose gradient fails first."""

    def forward(self, x: Tensor) -> Tensor:
        root = torch.sqrt(x - 1)
        return torch.where(x > 1, torch.log(root), x)


class Beneath(nn.Module):
    """A loss that the module keeps in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.inner.weight)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.inner(x)
        self.penalty = torch.log(torch.exp(logits).sum(-1)).sum()
        return logits.tanh()


def test_a_value_that_the_forward_leaves_out_is_found_where_it_was_made() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), LeftOut())
    nn.init.eye_(model[0].weight)
    finding = backward_of(model, HEALTHY_AND_ZERO)
    assert finding.operation == "aten.sqrt.default"
    assert new_line(works(finding)) == "return torch.where(x > 1, 0.5 * torch.log(x - 1), x)"


def test_a_value_in_an_attribute_is_found_and_its_cure_proven() -> None:
    """No output and no gradient of one shows the value, so the changed expression itself has to be finite."""
    model = Beneath()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, gradients=True):
        (model(HEALTHY_AND_ZERO * 100).sum() + model.penalty).backward()
        with pytest.raises(NonFiniteError) as error:
            optimizer.step()
    finding = error.value.report.finding
    assert finding is not None
    assert finding.operation == "aten.exp.default"
    assert new_line(works(finding)) == "self.penalty = torch.logsumexp(logits, -1).sum()"


class ByHand(nn.Module):
    """A softmax whose exponential overflows for one row. The other row has scores above those of a clamp."""

    def forward(self, x: Tensor) -> Tensor:
        e = torch.exp(2 * x)
        return e / e.sum(-1, keepdim=True)


def test_a_softmax_by_hand_becomes_that_of_torch() -> None:
    cure = works(failed(ByHand(), torch.tensor([[15.0, 14.5], [50.0, 10.0]])))
    assert new_line(cure) == "return torch.softmax(2 * x, dim=-1)"
    assert cure.effect.startswith("changes 2 of 4 elements")
    assert "; agrees with float64" in cure.effect


class Schedule(nn.Module):
    """Divides by one local value twice, so that a guard of one division is not enough."""

    def forward(self, x: Tensor) -> Tensor:
        rest = 1 - x
        a = x / rest
        b = x.square() / rest
        return a + b


def test_a_divisor_of_two_lines_is_guarded_where_it_is_made() -> None:
    cure = works(failed(Schedule(), torch.tensor([1.0, 0.5])))
    assert new_line(cure) == "rest = torch.where((1 - x).abs() < 1e-8, 1e-8, 1 - x)"
    assert cure.effect.startswith("changes 1 of 2 elements")


def test_a_gradient_that_only_the_whole_backward_has_is_found() -> None:
    """Two branches that share their input: the gradient there is a sum, made by no call alone."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
            self.root = Root()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            return self.other(hidden).sum(-1) + self.root(hidden)

    finding = backward_of(Twice(), HEALTHY_AND_ZERO)
    assert finding.operation == "SqrtBackward0"
    assert new_line(works(finding)) == "return torch.linalg.vector_norm(x, dim=-1)"


def test_a_change_is_no_cure_while_its_gradient_fails() -> None:
    """xlogy is finite at 0, and its gradient there is not, so the clamp is told."""

    class Entropy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            p = self.scale * x
            return -(p * torch.log(p)).sum()

    assert "clamp" in new_line(works(failed(Entropy(), HEALTHY_AND_ZERO)))
    with torch.no_grad():
        assert "xlogy" in new_line(works(failed(Entropy(), HEALTHY_AND_ZERO)))


def test_other_threads_compute_what_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model of the same class runs its old body while the change is tried in this process."""
    monkeypatch.setenv("NANWATCH_RERUN", "in-process")
    other = Ratio()
    expected = other(HEALTHY_AND_ZERO).isnan().tolist()
    results: list[Any] = []

    def runs(*args: Any, **kwargs: Any) -> Any:
        thread = threading.Thread(target=lambda: results.append(other(HEALTHY_AND_ZERO).isnan().tolist()))
        thread.start()
        thread.join()
        return run(*args, **kwargs)

    run = patches_module.run
    with mock.patch.object(patches_module, "run", runs):
        assert works(failed(Ratio(), HEALTHY_AND_ZERO))
    assert results
    assert all(one == expected for one in results)


def test_code_without_source_has_no_change_and_says_why() -> None:
    """A function that was made by exec has no line; the finding is whole without it."""
    space: dict[str, Callable[..., Any]] = {}
    exec(compile("def forward(self, x):\n    return x / x.sum()\n", "<made>", "exec"), space)
    model = type("Made", (nn.Module,), {"forward": space["forward"]})()
    finding = failed(model, torch.zeros(3))
    assert finding.operation == "aten.div.Tensor"
    assert finding.cures == ()
    assert any("not at hand" in one for one in finding.remarks)
