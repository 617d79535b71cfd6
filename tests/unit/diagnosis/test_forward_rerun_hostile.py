"""Re-runs of forwards that are hard to run twice, and findings in odd places: the operation is still named."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import GeneratorType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanwatch import Finding, NonFiniteError, replay, watch
from support.examined import Does, culprit
from support.spy import Spy


def log(x: Tensor) -> Tensor:
    return x.log()  # culprit


def finding_of(
    model: nn.Module,
    *args: Any,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **options: Any,
) -> Finding:
    """The finding of the error that this call raises."""
    with watch(model, **options), within(), pytest.raises(NonFiniteError) as error:
        model(*args)
    finding = error.value.report.finding
    assert finding is not None
    return finding


def assert_is_the_log(finding: Finding, module: str) -> None:
    """Assert that the finding is that of `log`, and that the re-run has shown it."""
    found = (finding.module, finding.origin, finding.operation, finding.source, finding.transient)
    assert found == (module, "produced", "aten.log.default", culprit(log), False)


# Forwards with effects


def test_a_forward_that_prints_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """The re-run prints nothing, and what the forward counts goes on from where it was."""
    counts = []

    def forward(part: nn.Module, x: Tensor) -> Tensor:
        counts.append(len(counts))
        sys.stdout.write(f"step {len(counts)}\n")
        return part(x)

    assert_is_the_log(finding_of(Does(forward, Does(log)), torch.zeros(2)), "parts.0")
    printed = capsys.readouterr().out.splitlines()
    assert (printed, counts) == (["step 1"], [0])


def test_a_forward_that_takes_from_an_iterator_of_its_own() -> None:
    """The re-run takes what the first has taken; from a generator it takes nothing, and says so."""
    for batches in (iter([torch.zeros(2), torch.ones(2)]), (x for x in (torch.zeros(2), torch.ones(2)))):
        finding = finding_of(Does(lambda part, x, left=batches: part(next(left)), Does(log)), torch.ones(2))
        if isinstance(batches, GeneratorType):
            assert (finding.module, finding.operation, finding.transient) == ("parts.0", None, None)
            assert any("takes a value from a generator" in remark for remark in finding.remarks)
        else:
            assert_is_the_log(finding, "parts.0")
        assert [x.tolist() for x in batches] == [[1.0, 1.0]]


def test_a_forward_that_draws_from_numpy() -> None:
    """The user's next draws are those that they would have been without a re-run."""

    def forward(part: nn.Module, x: Tensor) -> Tensor:
        return part(x * float(np.random.rand() < 2))

    draws = []
    for rerun in (False, True):
        np.random.seed(3)
        finding = finding_of(Does(forward, Does(log)), torch.zeros(2), rerun=rerun)
        assert (finding.operation == "aten.log.default") == rerun
        draws.append(np.random.rand(4).tolist())
    assert draws[0] == draws[1]


def test_a_forward_that_warns() -> None:
    """Where warnings are errors, what the re-run warns of is at most a remark."""

    def forward(part: nn.Module, x: Tensor) -> Tensor:
        if runs.values:
            warnings.warn("again", UserWarning, stacklevel=2)
        runs.add()
        return part(x)

    runs = Spy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finding = finding_of(Does(forward, Does(log)), torch.zeros(2))
    assert (finding.module, finding.transient) == ("parts.0", None)
    assert any("UserWarning: again" in remark for remark in finding.remarks)


class Counting(torch.autograd.Function):
    """The log, by a function that keeps what it was given; where it is broken, only the first call is wrong."""

    kept: ClassVar[list[Tensor]] = []
    broken = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counting.kept.append(x)
        if Counting.broken:
            return x * (float("inf") if len(Counting.kept) == 1 else 1.0)
        return log(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize("broken", [False, True])
def test_a_custom_function_that_keeps_state(broken: bool) -> None:
    """Its operations are seen, also where its state makes the difference: a re-run begins with the same."""
    Counting.kept.clear()
    Counting.broken = broken
    model = Does(lambda x: Counting.apply(x))
    finding = finding_of(model, (torch.ones if broken else torch.zeros)(2, requires_grad=True))
    if broken:
        assert (finding.operation, finding.transient) == ("aten.mul.Tensor", False)
        assert len(Counting.kept) == 1
    else:
        assert_is_the_log(finding, "")


# Where the module is called


def test_the_second_call_of_a_module() -> None:
    """The first call of it was finite: the second is the one that is examined."""
    finding = finding_of(Does(lambda part, x: part(part(x)), Does(log)), torch.ones(2))
    assert_is_the_log(finding, "parts.0")
    assert finding.operands[0].abs_max == 0


def test_a_shared_module() -> None:
    """Called under its first name and well, then under the other and not: the frames have the first one."""
    part = Does(log)
    model = nn.Sequential(part, nn.Sequential(part))
    assert_is_the_log(finding_of(model, torch.ones(2)), "0")


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_activation_checkpointing(reentrant: bool) -> None:
    """Both kinds, in the forward."""
    model = Does(lambda part, x: checkpoint(part, x * 0, use_reentrant=reentrant), Does(log))
    assert_is_the_log(finding_of(model, torch.ones(2, requires_grad=True)), "parts.0")


def test_under_functional_call(tmp_path: Path) -> None:
    """The weights are those of the call, also in the capsule."""
    pytest.importorskip("safetensors")
    model = nn.Sequential(nn.Linear(2, 2, bias=False), Does(lambda x: log(x * 1e-30)))
    weights = {"0.weight": torch.zeros(2, 2)}
    with watch(model, output_dir=tmp_path), pytest.raises(NonFiniteError) as error:
        torch.func.functional_call(model, weights, (torch.ones(1, 2),))
    finding = error.value.report.finding
    assert finding is not None
    assert_is_the_log(finding, "1")
    assert not model[0].weight.eq(0).any()
    replayed = replay(tmp_path / "batch-0" / "capsule", model).finding
    assert replayed is not None
    assert (replayed.module, replayed.value) == ("1", "inf")


@pytest.mark.compile
@pytest.mark.parametrize("in_place", [True, False])
def test_in_a_compiled_submodule(in_place: bool) -> None:
    """Compiled code of a part runs operation by operation the second time."""
    torch._dynamo.reset()
    part = nn.Sequential(Does(lambda x: x * 0), Does(log))
    if in_place:
        part.compile(backend="eager")
    model = Does(lambda inner, x: inner(x), part if in_place else torch.compile(part, backend="eager"))
    assert_is_the_log(finding_of(model, torch.ones(2)), "parts.0.1")
    torch._dynamo.reset()


# Bad calls


@dataclasses.dataclass
class Out:
    """An output of a model."""

    first: Any
    second: Any


@pytest.mark.parametrize(
    ("wrap", "label"),
    [
        (lambda x, y: {"a": x, "b": {"c": y}}, "output[b][c]"),
        (lambda x, y: Out(x, [y]), "output[second][0]"),
        (lambda x, y: (x, (x, [x, (y,)])), "output[1][1][1][0]"),
        (lambda x, y: (x[:0], y), "output[1]"),
    ],
)
def test_in_an_output_that_is_a_container(wrap: Callable[..., Any], label: str) -> None:
    """The label says where, and the operation is the one that made that tensor."""
    finding = finding_of(Does(lambda x: wrap(x, log(x))), torch.zeros(2))
    assert finding.label == label
    assert_is_the_log(finding, "")


@pytest.mark.parametrize(
    ("of", "given", "index"),
    [
        (lambda x: log(x.t()), [[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]], (1, 1)),
        (lambda x: log(x)[:, ::2], [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], (0, 1)),
        (lambda x: log(x).expand(2, 2), [0.0, 1.0], (0, 0)),
        (lambda x: log(x.sum()), [0.0, 0.0], ()),
    ],
    ids=["transposed", "strided", "expanded", "0-d"],
)
def test_the_first_bad_element_of_any_layout(of: Any, given: Any, index: tuple[int, ...]) -> None:
    """Its index is that in the tensor's shape, as torch counts."""
    x = torch.tensor(given)
    finding = finding_of(Does(of), x)
    assert_is_the_log(finding, "")
    assert finding.index == index
    assert not of(x)[index].isfinite()


def test_the_log_of_nothing_but_zeros_is_no_mask() -> None:
    """A mask of zeros and ones has some of both: of zeros alone nobody is told that it was meant."""
    nothing = finding_of(Does(log), torch.zeros(2))
    assert not any("on purpose" in remark for remark in nothing.remarks)
    mask = finding_of(Does(log), torch.tensor([0.0, 1.0]))
    assert any("on purpose" in remark for remark in mask.remarks)
