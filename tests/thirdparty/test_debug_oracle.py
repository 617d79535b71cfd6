"""The drop-in against the class it stands in for: the same stdout, byte for byte, on real architectures."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import debug_utils as oracle

import nanwatch
from nanwatch.diagnosis import rerun
from nanwatch.integrations import debug
from support.architectures import ARCHITECTURES, built, inputs_of

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = list(ARCHITECTURES)
BATCHES = 3
INF, NAN = float("inf"), float("nan")
KINDS = oracle.DebugUnderflowOverflow, debug.DebugUnderflowOverflow


def transcript(
    kind: Any, name: str, where: str = "none", dtype: str = "fp32", *, training: bool = False, **options: Any
) -> tuple[str, bool]:
    """Return the text that three batches print while `kind` watches, and whether a ValueError ended them."""
    model = overflowing(name, where, dtype).train(training)
    kind(model, **options)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            for batch in range(BATCHES):
                inputs = inputs_of(name, seed=batch)
                with torch.autocast("cpu", dtype=DTYPES[dtype], enabled=dtype != "fp32"):
                    model(**inputs)
        except ValueError:
            return out.getvalue(), True
    return out.getvalue(), False


def overflowing(name: str, where: str, dtype: str) -> nn.Module:
    """Return a model with the weights of one module grown until a number leaves the format of its tensor."""
    model = copy.deepcopy(built(name))
    if where == "none":
        return model
    weighted = [module for module in model.modules() if getattr(module, "weight", None) is not None]
    # An embedding's output is normalized before it is multiplied: there only the weight itself can overflow.
    products = [module for module in weighted if isinstance(module, nn.Linear | nn.Conv2d)]
    module = {"first": weighted[0], "middle": products[len(products) // 2], "last": products[-1]}[where]
    with torch.no_grad():
        if where == "first":
            module.weight.mul_(1e30).mul_(1e30)
        else:
            # Still finite in fp32, where the sums are not; beyond fp16 as soon as autocast converts it.
            for weight in module.parameters():
                weight.fill_(1e6 if dtype == "fp16" else 3e38)
            module.weight[::2] *= -1
    return model


def cases() -> Iterator[Any]:
    """Yield each model without an overflow and with two; their places and formats take turns, and the four ways."""
    overflows = [
        *(("fp32", where) for where in ("first", "middle", "last")),
        ("bf16", "middle"),
        ("fp16", "last"),
    ]
    for i, name in enumerate(NAMES):
        for j, (dtype, where) in enumerate([("fp32", "none"), overflows[i % 5], overflows[(i + 2) % 5]]):
            training, mode = (i + j) % 4 > 1, ("detect", "trace")[(i + j) % 2]
            label = f"{name}-{dtype}-{'train' if training else 'eval'}-{where}-{mode}"
            yield pytest.param(name, dtype, training, where, mode, id=label)


@pytest.mark.parametrize(("name", "dtype", "training", "where", "mode"), list(cases()))
def test_stdout_is_the_same(
    name: str, dtype: str, training: bool, where: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both classes print the same bytes and end the run alike, detecting and tracing."""
    if name != "gpt2" or dtype != "fp32":  # a re-run takes 0.4 s, and these show that it prints nothing
        monkeypatch.setattr(rerun, "examine", lambda *_, **__: None)
    # After an overflow in a traced batch the oracle raises in the next untraced one, clean or not: that difference
    # has its own test, so here an overflow meets traced batches only.
    traced = [0, 2] if where == "none" else list(range(BATCHES))
    options = {"trace_batch_nums": traced} if mode == "trace" else {}
    expected, actual = (transcript(kind, name, where, dtype, training=training, **options) for kind in KINDS)
    assert actual == expected
    text, raised = expected
    assert raised == (mode == "detect" and where != "none")
    assert ("has infs" in text or "has nans" in text) == (where != "none")


@pytest.mark.parametrize("limit", [0, 5, 1000])
def test_max_frames_to_save_is_the_same(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dump holds as many frames as the oracle's, none and all included."""
    monkeypatch.setattr(rerun, "examine", lambda *_, **__: None)
    expected, actual = (transcript(kind, "gpt2", "middle", max_frames_to_save=limit) for kind in KINDS)
    assert actual == expected


def test_abort_after_batch_num_is_the_same() -> None:
    """The run ends with a ValueError after the same batch, with the same text before it."""
    options = {"trace_batch_nums": [0, 1, 2], "abort_after_batch_num": 1}
    expected, actual = (transcript(kind, "bert", **options) for kind in KINDS)
    assert actual == expected
    assert expected[1]
    assert "batch number=1 " in expected[0]
    assert "batch number=2 " not in expected[0]


def test_the_error_has_the_report_of_watch() -> None:
    """The error of the drop-in has the finding of nanwatch.watch, operation and line included, and its summary."""
    findings = []
    for attach in (debug.DebugUnderflowOverflow, nanwatch.watch):
        model = overflowing("gpt2", "middle", "fp32").eval()
        watcher = attach(model)
        with (
            pytest.raises(nanwatch.NonFiniteError, match="first seen in") as error,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            model(**inputs_of("gpt2", seed=0))
        watcher.stop()
        findings.append(error.value.report.finding)
    assert findings[0] == findings[1]
    assert findings[0].operation == "aten.mm.default"


@pytest.mark.compile
@pytest.mark.slow
def test_stdout_is_the_same_in_compiled_code(capsys: pytest.CaptureFixture[str]) -> None:
    """Under torch.compile every hook breaks the graph, the text is the same, and the values are those of each batch."""
    texts = []
    for kind in KINDS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        kind(model)
        compiled = torch.compile(model, backend="eager")
        for value in (1.0, 2.0):
            compiled(torch.full((1, 2), value))
        with pytest.raises(ValueError, match=r"nan|inf"):
            compiled(torch.full((1, 2), INF))
        torch._dynamo.reset()
        texts.append(capsys.readouterr().out)
    assert texts[1] == texts[0]
    assert "batch number=2 " in texts[0]


@pytest.mark.parametrize(
    "values", [[1.0, -2.0, 0.0], [1.0, NAN], [INF, 1.0], [1.0, -INF], [NAN, -INF]], ids=str
)
def test_detect_overflow_is_the_same(values: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """detect_overflow returns and prints what the oracle's does."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64):
        x = torch.tensor(values).to(dtype)
        expected = oracle.detect_overflow(x, "ctx"), capsys.readouterr()
        assert (debug.detect_overflow(x, "ctx"), capsys.readouterr()) == expected


class Odd(nn.Module):
    """Returns what is no tensor, tuples in tuples, and a parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1e-40, -3.0]))
        self.same = self.weight
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        self.inner(None)
        self.inner([x])
        self.inner({"x": x})
        return x, (x + 1, None, (x,)), "text", [x], 3


def test_odd_values_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """None, lists, dicts, strings, nested tuples, subnormals and shared parameters print as the oracle's."""
    x = torch.tensor([[2.5e-310, 7e250]], dtype=torch.float64)
    texts = []
    for kind in KINDS:
        model = Odd()
        kind(model, trace_batch_nums=[0])
        model(x, None, 5, torch.arange(3))
        texts.append(capsys.readouterr().out)
    assert texts[1] == texts[0]
    assert "not a tensor output[3]" in texts[0]
