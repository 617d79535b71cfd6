"""The options of watch and the notes they lead to: when to act, what is meant, what is switched off."""

from __future__ import annotations

import argparse
import gc
import inspect
import re
import runpy
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.cli.run import run_parser
from nanwatch.records.note import Note
from nanwatch.report.report import NonFiniteError, Report
from nanwatch.session.api import DeferredWatch, watch
from nanwatch.session.options import Options
from support.toys import Scale, fault_of, latest, mlp, names

INF = float("inf")
NAN = float("nan")


class Takes(nn.Module):
    """Takes anything and returns nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        return None


# Off, on, paused


def test_pause_leaves_batches_out_and_resume_goes_on() -> None:
    """Calls made while paused are neither counted nor looked at, non-finite ones too; after stop() nothing resumes."""
    model = nn.Sequential(Scale())
    with watch(model) as w:
        model(torch.ones(1))
        w.pause()
        model(torch.full((1,), INF))
        w.resume()
        model(torch.ones(1))
        assert names(w) == [(0, "0"), (0, ""), (1, "0"), (1, "")]
    w.resume()
    model(torch.full((1,), INF))
    assert w.batch == 1


def test_pause_inside_a_forward_ends_the_recording_there() -> None:
    """Paused by a hook in the middle of a batch: what came before stays, and the next batch is whole."""
    model = nn.Sequential(Scale(), Scale(), Scale())
    w = watch(model)
    handle = model[1].register_forward_hook(lambda *_: w.pause())
    model(torch.ones(1))
    handle.remove()
    w.resume()
    model(torch.ones(1))
    w.stop()
    assert names(w) == [(0, "0"), (1, "0"), (1, "1"), (1, "2"), (1, "")]


@pytest.mark.parametrize(
    ("word", "enabled", "watches"),
    [("0", True, False), ("1", False, True), ("", True, True), ("", False, False), (None, False, False)],
)
def test_the_environment_goes_before_the_code(
    monkeypatch: pytest.MonkeyPatch, word: str | None, enabled: bool, watches: bool
) -> None:
    """NANWATCH=0 turns a watch off and NANWATCH=1 on, whatever the code says; a Watch that is off is whole."""
    monkeypatch.delenv("NANWATCH", raising=False)
    if word is not None:
        monkeypatch.setenv("NANWATCH", word)
    model = nn.Sequential(Scale(INF))
    with watch(model, enabled=enabled, on_nonfinite="record") as w:
        model(torch.ones(1))
        w.pause()
        w.resume()
    assert (w.batch is not None, bool(w.frames), w.report().finding is not None) == (watches,) * 3


def test_a_word_that_the_environment_variable_does_not_know_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NANWATCH=yes raises, naming the value and what is accepted."""
    monkeypatch.setenv("NANWATCH", "yes")
    with pytest.raises(ValueError, match=r"NANWATCH='yes' .* 1 \(watch\) or 0"):
        watch(nn.ReLU())


# When to act


def _poisoned_weight(model: nn.Module) -> Tensor:
    model[2].weight.data[0, 0] = NAN
    return torch.ones(2, 3)


def _poisoned_input(model: nn.Module) -> Tensor:
    return torch.tensor([[1.0, INF, 0.0]])


def _overflow(model: nn.Module) -> Tensor:
    model[0].weight.data.fill_(3e38)
    return torch.ones(2, 3)


@pytest.mark.parametrize("poison", [_poisoned_weight, _poisoned_input, _overflow])
def test_check_at_the_batch_gives_the_report_of_check_at_the_module(
    poison: Callable[[nn.Module], Tensor],
) -> None:
    """Raised at the end of the batch, the report is that of the first fault: same frames, same finding."""
    reports: dict[str, Report] = {}
    ends: dict[str, list[str]] = {}
    for check in ("module", "batch"):
        model = mlp()
        x = poison(model)
        with watch(model, check=check) as w:
            reports[check] = fault_of(model, x)
            ends[check] = [name for _, name in names(w)]
    assert reports["module"].to_json() == reports["batch"].to_json()
    assert ends["batch"] == ["0", "1", "2", ""]
    assert ends["module"] == ends["batch"][: len(ends["module"])] != ends["batch"]


def test_check_at_the_batch_tells_nothing_of_a_batch_that_raised_by_itself() -> None:
    """The forward's own exception is raised, and the fault before it stays in the report."""

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise LookupError("mine")

    model = nn.Sequential(Scale(INF), Fails())
    with watch(model, check="batch") as w, pytest.raises(LookupError, match="mine"):
        model(torch.ones(1))
    finding = w.report().finding
    assert finding is not None
    assert finding.module == "0"


def test_an_error_of_the_callable_is_the_calls_error_at_the_batch_too() -> None:
    """With check="batch" the callable is asked once, after the last module."""
    model = nn.Sequential(Scale(INF), Scale())
    asked: list[list[str]] = []

    def refuse(report: Report) -> None:
        asked.append([name for _, name in names(w)])
        raise KeyError(report.batch)

    with watch(model, check="batch", on_nonfinite=refuse) as w, pytest.raises(KeyError):
        model(torch.ones(1))
    assert asked == [["0", "1", ""]]


# Accepted values


@pytest.mark.parametrize("patterns", ["0", ("0", "9*"), ["?"]])
def test_allowed_infinities_are_noted_and_no_fault(patterns: Any) -> None:
    """In a module that may hold infinities they are "allowed"; what it hands on is a fault where it arrives."""
    model = nn.Sequential(*[Scale() for _ in range(10)])
    if patterns == ["?"]:
        model = nn.Sequential(Scale())
    model[0].factor = INF
    with watch(model, allow_inf=patterns, on_nonfinite="record") as w:
        model(torch.ones(1))
    assert (w.frames[0].records[1].note, w.frames[0].records[1].isfinite) == (Note("allowed"), False)
    finding = w.report().finding
    assert finding is not None
    if len(model) > 1:
        assert (finding.module, finding.origin, finding.source_module) == ("1", "received", "0")
    else:
        assert finding.module == ""


def test_a_nan_is_never_allowed() -> None:
    """allow_inf excuses no nan, alone or among infinities."""
    for value in ([NAN, 1.0], [INF, NAN]):
        model = nn.Sequential(nn.Identity())
        with watch(model, allow_inf="*"):
            finding = fault_of(model, torch.tensor(value)).finding
        assert finding is not None
        assert (finding.module, finding.origin) == ("", "data")


FP32, FP16 = torch.finfo(torch.float32), torch.finfo(torch.float16)
CAUSAL = torch.triu(torch.ones(4, 4), 1)
MASKS = {
    "-inf": CAUSAL.masked_fill(CAUSAL == 1, -INF),
    "minimum": CAUSAL * FP32.min,
    "minimum of half": CAUSAL.half() * FP16.min,
    "batched": (CAUSAL * FP32.min).expand(2, 1, 4, 4),
    "one row": torch.tensor([0.0, -INF, -INF]),
    "transposed view": torch.tril(torch.ones(3, 3), -1).masked_fill(CAUSAL.t()[:3, :3] == 1, -INF).t(),
}
FAULTS = {
    "one row without a zero": torch.tensor([[0.0, -INF], [-INF, -INF]]),
    "plus infinity": torch.tensor([0.0, INF]),
    "another number": torch.tensor([0.0, -INF, 1.0]),
    "nan": torch.tensor([0.0, -INF, NAN]),
    "no dimension": torch.tensor(-INF),
    "nothing but -inf": torch.full((2, 2), -INF),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("place", ["argument", "keyword", "nested", "buffer"])
def test_an_additive_mask_is_no_fault(mask: Tensor, place: str) -> None:
    """Zeros and -inf, or zeros and the dtype's minimum, with a zero in every row: noted as a mask."""
    model = Takes()
    if place == "buffer":
        model.register_buffer("mask", mask)
    with watch(model) as w:
        model(
            *([mask] if place == "argument" else [[mask]] if place == "nested" else []),
            **({"mask": mask} if place == "keyword" else {}),
        )
    label = {"argument": "input[0]", "nested": "input[0][0]", "keyword": "input[mask]", "buffer": "mask"}[
        place
    ]
    assert latest(w, label).note == Note("mask")
    assert not latest(w, label).is_fault


@pytest.mark.parametrize("value", FAULTS.values(), ids=FAULTS)
def test_what_only_looks_like_a_mask_is_a_fault(value: Tensor) -> None:
    """A fully masked row makes nan in softmax; other infinities are no mask at all."""
    model = Takes()
    with watch(model):
        finding = fault_of(model, value).finding
    assert finding is not None
    assert finding.label == "input[0]"


def test_the_same_values_in_an_output_are_a_fault() -> None:
    """-inf among zeros that a module computes is the log of a zero, not a mask."""
    model = nn.Sequential(Scale())
    model[0].forward = torch.log  # type: ignore[method-assign]
    with watch(model), pytest.raises(NonFiniteError, match="`output` of 0"):
        model(torch.tensor([1.0, 0.0]))


# Tried at the start


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"scaler": torch.amp.GradScaler("cpu")}, "scaler has no effect without gradients=True"),
        ({"max_skipped_steps": 3}, "max_skipped_steps has no effect without gradients=True"),
        ({"log_every": 9}, "log_every has no effect without sinks="),
    ],
)
def test_an_option_without_effect_is_an_error(options: dict[str, Any], needed: str) -> None:
    """Set by itself it raises and names what it needs; so does a callback, before there is a model."""
    for start in (lambda: watch(nn.ReLU(), **options), lambda: DeferredWatch(options)):
        with pytest.raises(ValueError, match=needed):
            start()
    more = {"gradients": True, "sinks": lambda *_: None, "weights": True}
    watch(nn.ReLU(), **{**options, **more}).stop()


def test_the_scaler_of_a_trainer_is_taken_only_with_gradients() -> None:
    """A trainer offers its own without being asked: no error comes of it."""
    for gradients in (True, False):
        scaler = torch.amp.GradScaler("cpu")
        deferred = DeferredWatch({"gradients": gradients})
        started = deferred.start(nn.ReLU(), scaler)
        assert (started._options.scaler is scaler) == gradients
        deferred.stop()


def test_what_a_watch_says_of_itself() -> None:
    """Class of the model, batches and state."""
    model = nn.Sequential(nn.ReLU())
    w = watch(model)
    told = [repr(w)]
    model(torch.ones(1))
    told.append(repr(w))
    w.pause()
    told.append(repr(w))
    w.resume()
    model(torch.ones(1))
    w.stop()
    told += [repr(w), repr(watch(model, enabled=False))]
    del model
    gc.collect()
    assert told == [
        "<Watch of Sequential: 0 batches, watching>",
        "<Watch of Sequential: 1 batch, watching>",
        "<Watch of Sequential: 1 batch, paused>",
        "<Watch of Sequential: 2 batches, stopped>",
        "<Watch of Sequential: 0 batches, switched off>",
    ]
    assert repr(w) == "<Watch of a model that is gone: 2 batches, stopped>"


def test_signature_fields_flags_and_page_agree() -> None:
    """`watch`, its docstring, `Options`, `nanwatch run` and docs/options.md have the same options."""
    declared = {one.name: one for one in fields(Options)}
    signature = inspect.signature(watch).parameters
    assert list(declared) == [
        name for name, one in signature.items() if one.kind is one.KEYWORD_ONLY and not name.startswith("_")
    ]
    assert {name: one.default for name, one in declared.items()} == {
        name: signature[name].default for name in declared
    }
    described = inspect.getdoc(watch).partition("Args:")[2].partition("\n\n")[0]  # type: ignore[union-attr]
    entries = re.findall(r"^    (\w[\w, ]*): ", described, re.MULTILINE)
    assert ", ".join(entries).split(", ") == ["model", *declared]
    flags = {one.dest: one.default for one in run_parser()._actions if one.dest in declared}
    assert set(flags.values()) == {argparse.SUPPRESS}
    assert declared.keys() - flags.keys() == {"enabled", "optimizer", "scaler"}
    page = runpy.run_path(str(Path(nanwatch.__file__).parents[2] / "docs" / "make_options.py"))
    assert page["PLACE"].read_text(encoding="utf-8") == page["page"](), "run python docs/make_options.py"
