"""parametrize.cached(): re-runs, cures and capsules with weights that are computed once in such a block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import nanwatch
from nanwatch import Finding, NonFiniteError, watch
from nanwatch.diagnosis.batch_snapshot import BatchSnapshot
from nanwatch.precision.casting import cached_parametrizations


class Times(nn.Module):
    """A weight times a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, w: Tensor) -> Tensor:
        return w * self.factor


def model(factor: float, *rest: nn.Module) -> nn.Sequential:
    """A layer of ones, times that factor."""
    made = nn.Sequential(nn.Linear(3, 3, bias=False), *rest)
    nn.init.ones_(made[0].weight)
    parametrize.register_parametrization(made[0], "weight", Times(factor))
    return made


def failed(net: nn.Module, *batches: Tensor, **options: Any) -> Finding:
    """The finding of the error that the last of these batches raises, all of them in one block."""
    with watch(net, **options), parametrize.cached():
        for x in batches[:-1]:
            net(x)
        with pytest.raises(NonFiniteError) as error:
            net(batches[-1])
    finding = error.value.report.finding
    assert finding is not None
    return finding


def test_a_value_made_by_a_parametrization_comes_again() -> None:
    """A value that the failed batch itself has cached is computed again, and so is found."""
    finding = failed(model(1e30, Times(1.0)), torch.full((2, 3), 1.0), torch.full((2, 3), 1e30))
    assert (finding.module, finding.operation, finding.transient) == ("0", "aten.mm.default", False)
    failed(model(torch.finfo(torch.float32).max, Times(1.0)).double().float(), torch.ones(2, 3))
    net = model(1.0)
    with torch.no_grad():
        net[0].parametrizations.weight.original.fill_(3e38)
    net[0].parametrizations.weight[0].factor = 2.0
    finding = failed(net, torch.ones(2, 3))
    assert (finding.module, finding.origin) == ("0.parametrizations.weight.0", "produced")
    assert (finding.operation, finding.transient) == ("aten.mul.Tensor", False)


def test_the_second_run_has_the_weight_that_the_first_had() -> None:
    """A cached weight is what the forward used, also when the weight it was made of has changed since."""
    net = model(1e30)
    x = torch.full((2, 3), 1e30)
    with watch(net), parametrize.cached():
        net(torch.ones(2, 3))
        with torch.no_grad():
            net[0].parametrizations.weight.original.zero_()
        with pytest.raises(NonFiniteError) as error:
            net(x)
    finding = error.value.report.finding
    assert finding is not None
    assert finding.transient is False
    assert finding.operands[1].abs_max == pytest.approx(1e30)


def test_the_users_block_is_as_it_was() -> None:
    """The tensors kept are the very same ones, with their graph; none that was made without one is left there."""
    net = model(2.0)
    with parametrize.cached():
        for warm in (False, True):
            if warm:
                net(torch.ones(1, 3))
            before = cached_parametrizations()
            assert bool(before) == warm
            with BatchSnapshot.capture(net, (torch.ones(1, 3),), {}).again() as call:
                call()
                assert all(x is None or not x.requires_grad for x in cached_parametrizations().values())
            after = cached_parametrizations()
            assert list(after) == list(before)
            assert all(after[key] is before[key] for key in before)
        (net(torch.ones(1, 3)).sum() + net(torch.ones(1, 3)).sum()).backward()
    assert torch.equal(net[0].parametrizations.weight.original.grad, torch.full((3, 3), 4.0))


def test_cures_are_tried_with_weights_of_their_own() -> None:
    """In float32 and bfloat16 the weight is computed anew; each cure is true when a user applies it in such a block."""
    net = model(30000.0, Times(1e-3)).half()
    x = torch.full((2, 3), 10.0).half()
    finding = failed(net, torch.full((2, 3), 0.1).half(), x)
    assert finding.remarks == ()
    assert [(cure.what.split(",")[0], cure.works) for cure in finding.cures] == [
        ("load the weights in bfloat16", True),
        ("run `0` in float32", False),
    ]
    with parametrize.cached():
        assert net(x).isinf().all()
        with nanwatch.run_in_fp32(net):
            y = net(x)
        assert torch.equal(y, torch.full((2, 3), 900.0).half())
        assert net(x).isinf().all()
    with parametrize.cached():
        assert net.to(torch.bfloat16)(x.bfloat16()).isfinite().all()


def test_gradients_flow_through_a_module_in_float32() -> None:
    """In such a block too, and what is kept there is the user's."""
    net = model(2.0).half()
    with parametrize.cached():
        net(torch.ones(1, 3).half())
        before = cached_parametrizations()
        with nanwatch.run_in_fp32(net[0]):
            net(torch.ones(1, 3).half()).sum().backward()
        assert cached_parametrizations() == before
    assert torch.equal(net[0].parametrizations.weight.original.grad, torch.full((3, 3), 2.0).half())


def test_the_capsule_replays(tmp_path: Path) -> None:
    """The capsule holds the weight that the parametrization is given, and its call fails again."""
    pytest.importorskip("safetensors")
    net = model(1e30)
    failed(net, torch.ones(2, 3), torch.full((2, 3), 1e30), output_dir=tmp_path)
    replayed = nanwatch.replay(tmp_path / "batch-1" / "capsule", model(1e30)).finding
    assert replayed is not None
    assert (replayed.module, replayed.label, replayed.value) == ("0", "output", "inf")
