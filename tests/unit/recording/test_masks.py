"""Non-finite values that are meant: masks where each row has a finite score, and nans that the options allow."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.records.record import Note
from support.recorders import watched
from support.toys import Does, fault_of

pytestmark = pytest.mark.usefixtures("each_recorder")


def scores(last: nn.Module, mask: Tensor, value: float = -torch.inf) -> nn.Module:
    """Scores masked in the model's own code, and handed to a module."""
    return Does(lambda last, x: last(x.masked_fill(mask, value)), last)


CAUSAL = torch.ones(4, 4, dtype=torch.bool).triu(1)
EMPTY_ROW = CAUSAL.clone().index_fill(0, torch.tensor(2), True)


def notes(model: nn.Module, x: Tensor) -> list[str]:
    """The notes of the records of a forward that raises nothing."""
    with nanwatch.watch(model) as w:
        model(x)
    assert w.report().finding is None
    return [record.note for frame in w.frames for record in frame.records]


def calls(last: nn.Module, arguments: Callable[[Tensor], Mapping[str, Any]]) -> nn.Module:
    """A module called with what the function makes of x, as attention or a loss is."""

    def forward(last: nn.Module, x: Tensor) -> Tensor:
        output = last(**arguments(x))
        return output[0] if isinstance(output, tuple) else output

    return Does(forward, last)


class Attention(nn.Module):
    """Attention of the user's own, whose bias has ALiBi's distances and a causal mask."""

    def forward(self, x: Tensor, attn_bias: Tensor) -> Tensor:
        return (x @ x.mT + attn_bias).softmax(-1) @ x


ALIBI = -(torch.arange(4)[:, None] - torch.arange(4)).abs() * 0.5
BIAS = ALIBI.masked_fill(CAUSAL, -torch.inf)
CLASSES = torch.tensor([0, 0, 0, 1]).bool()
MASKED = {
    "softmax": scores(nn.Softmax(-1), CAUSAL),
    "log-softmax": scores(nn.LogSoftmax(2), CAUSAL),
    "multi-head attention": calls(
        nn.MultiheadAttention(4, 2, batch_first=True),
        lambda x: {"query": x, "key": x, "value": x, "attn_mask": BIAS},
    ),
    "a mask that is handed on": Does(lambda last, x: x * last((~CAUSAL).log()).exp(), nn.Identity()),
    "own attention": calls(Attention(), lambda x: {"x": x, "attn_bias": BIAS}),
    "classes of a loss": calls(
        nn.CrossEntropyLoss(),
        lambda x: {
            "input": x.masked_fill(CLASSES[:, None], -torch.inf),
            "target": torch.zeros(2, 4, dtype=torch.long),
        },
    ),
    "maximum of what is padded": calls(
        nn.AdaptiveMaxPool1d(2), lambda x: {"input": nn.functional.pad(x, (1, 1), value=-torch.inf)}
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_masks_are_no_failure(name: str) -> None:
    """PyTorch's own output has no nan. Twice, as a report must not depend on what was excused before."""
    x = torch.randn(2, 4, 4)
    assert not MASKED[name](x).isnan().any()
    for _ in range(2):
        assert Note("mask") in notes(MASKED[name], x)


UNMASKED = {
    "a row without a score": (scores(nn.Softmax(-1), EMPTY_ROW), "input[0]"),
    "inf in scores": (scores(nn.Softmax(-1), CAUSAL, torch.inf), "input[0]"),
    "nan in scores": (scores(nn.Softmax(-1), CAUSAL, torch.nan), "input[0]"),
    "a mask of no softmax": (scores(nn.ReLU(), CAUSAL), "input[0]"),
    "a query is no mask": (
        calls(nn.MultiheadAttention(4, 2), lambda x: {"query": x + BIAS, "key": x, "value": x}),
        "input[query]",
    ),
    "an empty row": (
        calls(Attention(), lambda x: {"x": x, "attn_bias": BIAS.masked_fill(EMPTY_ROW, -torch.inf)}),
        "input[attn_bias]",
    ),
    "a class that is the target": (
        calls(
            nn.CrossEntropyLoss(),
            lambda x: {"input": x.mean(1).masked_fill(CLASSES, -torch.inf), "target": torch.tensor([3, 3])},
        ),
        "output",
    ),
    "a window of a maximum that is all padding": (
        calls(nn.AdaptiveMaxPool1d(2), lambda x: {"input": nn.functional.pad(x, (8, 0), value=-torch.inf)}),
        "output",
    ),
}


@pytest.mark.parametrize("name", UNMASKED)
def test_what_is_no_mask_is_a_failure(name: str) -> None:
    model, label = UNMASKED[name]
    with nanwatch.watch(model, rerun=False):
        finding = fault_of(model, torch.randn(2, 4, 4)).finding
    assert (finding.module, finding.label) == ("parts.0", label)


class Missing(nn.Module):
    """Readings that are missing are nan, and the model knows so."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.linear = nn.Identity(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.known(x)
        return self.linear(torch.cat([x.nan_to_num(0), x.isnan().float()], -1))


def test_missing_values_are_allowed_by_the_option_that_the_report_names() -> None:
    """Each module that is given the values is named. A nan of another module is a failure."""
    model, x = Missing(), torch.randn(2, 4).index_fill(1, torch.tensor(1), torch.nan)
    with nanwatch.watch(model), pytest.raises(nanwatch.NonFiniteError) as error:
        model(x)
    assert "watch with allow='nan:(root)'" in str(error.value)
    with nanwatch.watch(model, allow=["nan:(root)", "nan:known"]) as w:
        model(x)
    assert (w.report().finding, w.frames[0].records[0].note) == (None, Note("allowed"))
    model.linear.weight.data.fill_(torch.nan)
    with nanwatch.watch(model, allow="nan:known"):
        assert fault_of(model, x).finding.module == "linear"


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_a_nan_that_is_in_no_output_is_meant(recorder: str) -> None:
    """An infinity may have overflowed, integers do not show that a nan came in, and a gradient shows no data."""
    x, computed = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan], requires_grad=True)
    given = [(Tensor.nan_to_num, x, True), (Tensor.nan_to_num, computed, False), (Tensor.argmax, x, False)]
    for change, value, is_quiet in (*given, (Tensor.tanh, x.nan_to_num(torch.inf), False)):
        model = nn.Sequential(Does(lambda x, change=change: change(x)))
        with watched(model, recorder, on_nonfinite="record") as w:
            model(value)
        record = w.frames[0].records[0]
        assert (record.is_fault, record.note) == (not is_quiet, Note("absorbed") if is_quiet else None)


def test_missing_data_is_not_blamed_for_what_the_model_makes() -> None:
    model = Does(lambda last, x, less: last((x.nan_to_num(1) - less).log()), nn.Identity())
    x = torch.tensor([1.0, torch.nan])
    with nanwatch.watch(model, on_nonfinite="record", rerun=True) as w:
        model(x, 0.5)
        model(x, 2.0)
    finding = w.report().finding
    assert finding is not None
    assert (finding.origin, finding.module, finding.operation) == ("received", "parts.0", "aten.log.default")


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_scores_that_a_line_masks_are_allowed_from_then_on(recorder: str) -> None:
    """By a number of the program, with a score left in each row. The log of a zero is a failure."""
    mask = torch.eye(3).bool()
    model = nn.Sequential(Does(lambda x: x.masked_fill(mask, -torch.inf)), nn.Identity())
    with watched(model, recorder) as w:
        with pytest.warns(RuntimeWarning, match="test_masks.py:[0-9]+ wrote it as a number.*allow='inf:0'"):
            model(torch.rand(3, 3))
        model(torch.rand(3, 3))
    notes = [record.note for frame in w.frames[-3:] for record in frame.records]
    assert notes == [None, Note("allowed"), Note("allowed"), Note("allowed"), None, Note("allowed")]
    for change in (torch.log, lambda x: x.masked_fill(x < 2, -torch.inf)):
        with watched(model := nn.Sequential(Does(change)), recorder):
            fault_of(model, torch.eye(3))


def test_scores_that_leave_float16_are_no_mask() -> None:
    """Some become -inf and others come near the end; a mask of float16's lowest number and -inf stays one."""

    def scores16(scale: float, lowest: float) -> nn.Module:
        return Does(
            lambda last, q: last(((q * scale).clamp(max=60000) + CAUSAL * lowest).half()), nn.Softmax(-1)
        )

    torch.manual_seed(0)
    q = torch.randn(8, 4, 4)
    assert Note("mask") in notes(scores16(1.0, -65519.0), q)
    model = scores16(3e4, 0.0)
    with nanwatch.watch(model, rerun=False), pytest.raises(nanwatch.NonFiniteError):
        model(q)


@pytest.mark.parametrize("key", [0.0, 1e-3])
def test_a_scaled_product_that_overflows_is_no_mask(key: float) -> None:
    """Its values could be those of a mask; autograd tells that nothing was masked."""

    model = Does(lambda softmax, q, k: softmax((q @ k.mT).view(1, 2, 2) / 2), nn.Softmax(-1))
    q = torch.full((2, 8), 100.0, dtype=torch.float16, requires_grad=True)
    k = torch.tensor([[key], [-200.0]], dtype=torch.float16).expand(2, 8)
    with nanwatch.watch(model, rerun=False):
        finding = fault_of(model, q, k).finding
    assert (finding.module, finding.label) == ("parts.0", "input[0]")
