"""Cures that are an option of the guilty module, such as the eps of a norm, where its own line makes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import NamedTuple

from torch import nn

from ...instrumentation.functions import find_called
from ...instrumentation.wrapped_names import module_names
from ...report.finding import Cure
from ..batch_snapshot import BatchSnapshot
from ..diagnosis import BackwardStart
from ..experiment import Conditions, code_of, run
from ..float64 import agreement, results_in_float64
from .code_swap import node_of
from .source import Edit, SourceFile


@dataclass(slots=True)
class SearchResult:
    """The cures that work, remarks, and the number of forwards used."""

    cures: list[Cure] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    runs: int = 0


# Options of PyTorch's own modules that end a failure, each with the value to give and what that does.
_OPTIONS: dict[type[nn.Module], tuple[str, float, str]] = {
    **dict.fromkeys(
        (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase),
        ("eps", 1e-5, "divide by more than 0 where all values are the same"),
    ),
    nn.CosineSimilarity: ("eps", 1e-4, "keep the divisor away from 0"),
    nn.CTCLoss: (
        "zero_infinity",
        True,
        "leave out samples that are shorter than their labels, whose loss is infinite",
    ),
}


class ModuleOption(NamedTuple):
    """An option of the guilty module, the modules that one line makes with it, and that line where it is known."""

    module: str
    name: str
    value: float
    words: str
    modules: tuple[nn.Module, ...]
    file: SourceFile | None = None
    edit: Edit | None = None

    @classmethod
    def of(cls, model: nn.Module, name: str) -> ModuleOption | None:
        """Return the option of the module of this name that may end its failure, None where there is none."""
        called = find_called(model, name)
        if called is None:
            return None
        kind = type(called.module)
        option = next((row for base, row in _OPTIONS.items() if issubclass(kind, base)), None)
        if option is None or (getattr(called.module, option[0]) or 0) >= option[1]:
            return None
        above = name
        while above:
            above = above.rpartition(".")[0]
            around = find_called(model, above)
            made = None if around is None else _construction(type(around.module), kind.__name__)
            if around is not None and made is not None:
                makers = (module for module in model.modules() if type(module) is type(around.module))
                same = (inner for maker in makers for inner in maker.modules() if type(inner) is kind)
                edit = _edit_of(*made, kind, option[0], repr(option[1]))
                return cls(name, *option, tuple(dict.fromkeys(same)), made[0], edit)
        return cls(name, *option, (called.module,))

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Give the modules the value for the block."""
        before = [getattr(module, self.name) for module in self.modules]
        try:
            for module in self.modules:
                setattr(module, self.name, self.value)
            yield
        finally:
            for module, value in zip(self.modules, before, strict=True):
                setattr(module, self.name, value)

    def cure(self, model: nn.Module, effect: str) -> Cure:
        """Return the change as a cure."""
        if self.file is None or self.edit is None:
            code = f"{code_of(model, self.module)}.{self.name} = {self.value!r}"
            return Cure(f"{self.words}: write `{code}` once the model is made", True, None, "", effect)
        line, old = self.file.line_of(self.edit.span), self.file.part(self.edit.span)
        where = f"{Path(self.file.name).name}:{line}"
        what = f"{self.words}: write `{self.edit.text}` for `{old}` at {where}"
        return Cure(what, True, None, self.file.patch(self.file.edited([self.edit])), effect)


def _construction(kind: type[nn.Module], name: str) -> tuple[SourceFile, ast.Call] | None:
    """Return the only call of this name in the constructor of a class."""
    code = getattr(kind.__init__, "__code__", None)
    file = None if code is None else SourceFile.load(code.co_filename)
    if code is None or file is None or (node := node_of(file.tree, code)) is None:
        return None
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == name]
    return (file, calls[0]) if len(calls) == 1 else None


def _edit_of(file: SourceFile, call: ast.Call, kind: type[nn.Module], option: str, value: str) -> Edit:
    position = list(signature(kind).parameters).index(option)
    given = [keyword for keyword in call.keywords if keyword.arg == option]
    if given or position < len(call.args):
        return Edit(file.span(given[0].value if given else call.args[position]), value)
    span = file.span(call)
    body = file.part(span)[:-1].rstrip().removesuffix(",")
    return Edit(span, f"{body}{'' if body.endswith('(') else ', '}{option}={value})")


def try_option(
    option: ModuleOption,
    snapshot: BatchSnapshot,
    model: nn.Module,
    conditions: Conditions,
    start: BackwardStart | None,
    result: SearchResult,
) -> None:
    """Run the batch with the option, and keep it as a cure if it works."""
    result.runs += 2
    names = module_names(model)
    with option.hold():
        experiment = run(snapshot, names, allows=conditions.allows, backward=snapshot.grad, start=start)
    if experiment.error is not None or any(experiment.nonfinite()) or experiment.bad_gradients:
        return
    close = agreement(experiment.results, results_in_float64(snapshot))
    if close.is_close:
        result.cures.append(option.cure(model, close.words))
