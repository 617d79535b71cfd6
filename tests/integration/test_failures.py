"""Models that fail as real ones do: what nanwatch says of each is the truth, as a person wrote it down."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from failures import CASES, Case, Setup, table
from failures.judge import finding_of, wrong_cures, wrong_operation, wrong_place, wrong_transient
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nanwatch.numerics import _extension
from nanwatch.records.note import Note
from nanwatch.report.finding import Finding
from nanwatch.report.report import NonFiniteError
from nanwatch.session.api import watch

pytestmark = pytest.mark.filterwarnings("ignore:(var|std)\\(\\):UserWarning")

NAMES = {case.name: case for case in CASES}
EACH = pytest.mark.parametrize("case", CASES, ids=list(NAMES))
MADE = [case for case in CASES if case.operations]
ONE_CALL = [case for case in CASES if case.build().loop is None]
FORMAT = [case for case in CASES if case.format_cause]
needs_native = pytest.mark.skipif(_extension.C is None, reason="no compiled part")


# Seen by plain torch


def tensors_of(value: Any, label: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in tuples, lists and dicts, each with its label."""
    if isinstance(value, Tensor):
        yield label, value
    elif isinstance(value, tuple | list):
        for position, item in enumerate(value):
            yield from tensors_of(item, f"{label}[{position}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, f"{label}[{key}]")


def kinds(value: Any) -> set[str]:
    """Return which of nan and inf are in tensors and numbers, at any depth."""
    found = set()
    for x in torch.utils._pytree.tree_leaves(value):
        if isinstance(x, float) or (isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())):
            x = torch.as_tensor(x)
            found |= {name for name, test in (("nan", x.isnan()), ("inf", x.isinf())) if test.any()}
    return found


class Plain:
    """The first non-finite tensor that hooks on all modules see, and the first operation that made one."""

    def __init__(self, setup: Setup, case: Case) -> None:
        self.seen: tuple[str, str, str] | None = None  # module, label, value
        self.made: tuple[str, int] | None = None  # operation, line
        self._case = case
        mode = _Operations(self)
        handles = []
        for name, module in setup.model.named_modules():

            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                self._look(name, module, args, kwargs, output)

            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        handles.append(setup.model.register_forward_pre_hook(lambda *_: mode.start()))
        handles.append(setup.model.register_forward_hook(lambda *_: mode.stop()))
        with mode:
            setup.run()
        for handle in handles:
            handle.remove()

    def _look(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.seen is not None:
            return
        weights = module.named_parameters(recurse=False)
        buffers = module.named_buffers(recurse=False)
        inputs = [*tensors_of(args, "input"), *tensors_of(kwargs, "input")]
        with torch._C._DisableTorchDispatch():
            for label, x in [*weights, *buffers, *inputs, *tensors_of(output, "output")]:
                if found := kinds(x):
                    self.seen = (name, label, "+".join(sorted(found, reverse=True)))
                    return


class _Operations(TorchDispatchMode):
    """Keeps the first operation of a non-finite call that made nan of what had none, or inf of what was finite."""

    def __init__(self, plain: Plain) -> None:
        super().__init__()
        self._plain = plain
        self._is_inside = False

    def start(self) -> None:
        self._is_inside = True
        if self._plain.seen is None:
            self._plain.made = None  # what an earlier call made went well

    def stop(self) -> None:
        self._is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kinds((args, kwargs))
        output = func(*args, **(kwargs or {}))
        uninitialised = "empty" in func.name()
        if self._is_inside and self._plain.made is None and not uninitialised:
            made = kinds(output)
            if ("nan" in made and "nan" not in given) or (made and not given):
                self._plain.made = (str(func).split(".")[1], self._line())
        return output

    def _line(self) -> int:
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename == str(self._plain._case.file):
                return frame.f_lineno
            frame = frame.f_back
        return 0


@cache
def plain(name: str) -> Plain:
    """Return the facts about the case that plain torch shows."""
    return Plain(NAMES[name].build(), NAMES[name])


@EACH
def test_the_case_fails_as_it_says(case: Case) -> None:
    """Hooks on all modules that ask torch.isnan and isinf of every tensor see the truth's module, label and value."""
    assert plain(case.name).seen == (case.module, case.label, case.value)


@pytest.mark.parametrize("case", MADE, ids=[case.name for case in MADE])
def test_the_operation_is_that_of_the_marked_line(case: Case) -> None:
    """A dispatch mode sees the first bad value made by an operation of the truth, called from the marked line."""
    made = plain(case.name).made
    assert made is not None
    assert made[0] in case.operations
    assert made[1] == case.line


@pytest.mark.parametrize("case", ONE_CALL, ids=[case.name for case in ONE_CALL])
def test_where_no_operation_is_guilty_it_was_so_before(case: Case) -> None:
    """Data and weights, read before the call, are bad where no operation is, and finite where one is or may be."""
    setup = case.build()
    before = kinds((setup.args, setup.kwargs, setup.model.state_dict()))
    assert bool(before) == (not case.operations and not case.transient)


@pytest.mark.parametrize("case", ONE_CALL, ids=[case.name for case in ONE_CALL])
def test_float32_cures_what_has_a_format_for_its_cause(case: Case) -> None:
    """The same call in float32 is finite for these, and only for these."""
    assert (Plain(case.build().in_float32(), case).seen is None) == case.format_cause


# Reported by nanwatch


def test_there_are_cases_enough() -> None:
    """At least 34 failing models, each with a name of its own."""
    assert len(NAMES) == len(CASES) >= 34


@cache
def finding_of_name(name: str, recorder: str) -> Finding:
    """The finding of the error that the case raises under a watch."""
    return finding_of(NAMES[name], native=recorder == "native")


# 0.16 s a case: `make test` does with the recorder that users have.
TWIN = pytest.param("python", marks=[] if _extension.C is None else [pytest.mark.slow])


@pytest.mark.parametrize("recorder", [pytest.param("native", marks=needs_native), TWIN])
@EACH
def test_the_finding_is_the_truth(case: Case, recorder: str) -> None:
    """Module, tensor, origin and value of the finding are those of the truth."""
    wrong = wrong_place(case, finding_of_name(case.name, recorder))
    assert not wrong, wrong


def the_finding(case: Case) -> Finding:
    """The finding by the recorder that users have."""
    return finding_of_name(case.name, "python" if _extension.C is None else "native")


def test_operations_and_lines() -> None:
    """At least 28 of 30 findings name the operation and the line, or none where the call made nothing bad."""
    wrong = [text for case in CASES if (text := wrong_operation(case, the_finding(case)))]
    assert len(wrong) <= len(CASES) * 2 // 30, "\n".join(wrong)


@EACH
def test_only_what_does_not_come_again_is_transient(case: Case) -> None:
    """A re-run that is finite makes the finding transient; one that fails again does not."""
    assert not wrong_transient(case, the_finding(case))


@pytest.mark.parametrize("case", FORMAT, ids=[case.name for case in FORMAT])
def test_a_format_cause_has_a_cure_that_works(case: Case) -> None:
    """Where float32 would be finite, a cure is said to work, and each that is makes the whole forward finite."""
    wrong = wrong_cures(case, the_finding(case))
    assert not wrong, wrong


# Failures that docs/failures.md calls silent, or that look otherwise


class SquareNorm(nn.Module):
    """An RMS norm by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def test_an_infinity_that_is_divided_by_stays_silent() -> None:
    """In float16 the mean of squares is inf and the result zero: no tensor of the call is at fault."""
    model = nn.Sequential(SquareNorm())
    with watch(model) as w:
        y = model(torch.full((1, 4), 300.0).half())
    assert y.eq(0).all()
    assert w.report().finding is None


def test_fused_attention_makes_zeros_of_a_masked_row() -> None:
    """F.scaled_dot_product_attention with a row that masks everything is finite, and zero there."""
    x, mask = torch.randn(1, 4, 8), torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    y = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    assert not kinds(y)
    assert y[0, 1].eq(0).all()


class Divergence(nn.Module):
    """KL of two log probabilities."""

    def forward(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p.exp() * (log_p - log_q)).sum()


class Distilled(nn.Module):
    """A student of a teacher that is sure."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.loss = Divergence()

    def forward(self, x: Tensor, teacher: Tensor) -> Tensor:
        return self.loss(teacher.log(), self.head(x).log_softmax(-1))


def test_the_log_of_a_one_hot_target_looks_like_a_mask() -> None:
    """Zeros and -inf with a zero in every row are excused as an input; what is made of them is the finding."""
    torch.manual_seed(0)
    model = Distilled()
    with watch(model), pytest.raises(NonFiniteError) as error:
        model(torch.randn(2, 8), torch.eye(3)[:2])
    report = error.value.report
    assert report.finding is not None
    assert (report.finding.module, report.finding.label, report.finding.value) == ("loss", "output", "nan")
    assert [record.note for record in report.frames[-1].records] == [Note("mask"), None, None]


def test_the_page_has_the_table_of_the_cases() -> None:
    """docs/failures.md is what `benchmarks/judge_failures.py --write-table` writes."""
    text = table.PAGE.read_text()
    assert table.page(text) == text
