"""The calls of a second run in which a bad value is looked for, and what was seen of it there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..instrumentation.execution_context import Autocast, RngState
from ..instrumentation.temporary_wrappers import wrap_calls
from ..recording.observe import observe
from ..recording.walk import Leaf, call_leaves, leaves
from ..report.errors import spell
from ..report.finding import Finding, value_of
from ..report.record import Record, to_record
from ..report.spreading import spreads_of
from .damage import describe
from .examination import Call, Examination
from .left_calls import left_calls
from .lineage import Lineage


class _Guilty(NamedTuple):
    """A call, and what shows whether it wrote to what it was given."""

    call: Call
    versions: list[tuple[str, Tensor, int]]

    @classmethod
    def of(cls, call: Call) -> _Guilty:
        given = [(label, x) for label, x in call_leaves(call.args, call.kwargs) if isinstance(x, Tensor)]
        return cls(call, [(label, x, x._version) for label, x in given if not x.is_inference()])

    def remarks(self) -> list[str]:
        """What was written to."""
        return [
            f"the call wrote to its {label}, in place: what it was given is no longer there"
            for label, x, version in self.versions
            if x._version != version
        ]


class Scene:
    """The suspect, in whose record the bad value was seen, and the module whose calls are examined for what made it.

    When the suspect produced the value they are one; else the examined module is the one that called the suspect.
    """

    def __init__(
        self, finding: Finding, suspect: nn.Module, examined: nn.Module, name: str, lineage: Lineage
    ) -> None:
        self.found: Examination | None = None
        self.was_called = False
        self.trouble: list[str] = []
        self._finding = finding
        self._is_producer = finding.origin == "produced"
        self._suspect = suspect
        self._examined = examined
        self._name = name
        self._lineage = lineage
        # The calls of the examined module: all of the thread that makes the second run.
        self._under_way: list[_Guilty] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the calls of both modules are looked at."""
        try:
            with wrap_calls([self._suspect, self._examined], self._run):
                yield
        finally:
            self._lineage.active = False

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, and look at what the finding speaks of."""
        if self.found is not None:
            return module._call_impl(*args, **kwargs)
        own = None
        if module is self._examined:
            own = _Guilty.of(Call(self._name, module, args, kwargs, RngState.capture(), Autocast.capture()))
        # A receiver that nobody called was called by the batch.
        guilty = own if self._is_producer or not self._under_way else self._under_way[-1]
        is_receiver = not self._is_producer and module is self._suspect
        self.was_called = self.was_called or module is self._suspect
        if is_receiver:
            self._look(call_leaves(args, kwargs), guilty)
        try:
            result = module._call_impl(*args, **kwargs) if own is None else self._examine(own)
        except Exception as error:  # of a hook that looks for such values itself
            left = [call for call in left_calls(error) if call.module is module]
            if self._is_producer and left:
                self._look(leaves(left[-1].output, "output"), guilty)
            raise
        if self._is_producer:
            self._look(leaves(result, "output"), guilty)
        elif is_receiver:
            # A record is made after the call, which may have spoilt its own input.
            self._look(call_leaves(args, kwargs), guilty)
        return result

    def _examine(self, own: _Guilty) -> Any:
        self._under_way.append(own)
        try:
            with nullcontext() if len(self._under_way) > 1 else self._lineage:
                return own.call.module._call_impl(*own.call.args, **own.call.kwargs)
        finally:
            self._under_way.pop()

    def _look(self, given: list[Leaf], guilty: _Guilty | None) -> None:
        """See whether the value of the finding is there; where it is, settle what made it."""
        if self.found is not None or guilty is None:
            return
        try:
            for label, x in given:
                if label != self._finding.label or not isinstance(x, Tensor):
                    continue
                record = to_record(observe(x, label, "output" if self._is_producer else "input"))
                # Where infinities are allowed, earlier calls may have had some.
                if record.is_fault and ("nan" not in self._finding.value or "nan" in value_of(record)):
                    self.found = self._settled(x, record, guilty)
        except Exception as error:
            self.trouble.append(f"{self._finding.label} could not be looked at: {spell(error)}")

    def _settled(self, x: Tensor, record: Record, guilty: _Guilty) -> Examination:
        step = self._lineage.origin(x, nan="nan" in value_of(record))
        self._lineage.active = False
        remarks = []
        if step is None:
            remarks.append("no operation that goes through PyTorch's dispatcher was seen to make the value")
        elif step.meant:
            remarks.append(
                f"{step.operation} put {step.values} there, on purpose as it seems; if so, watch with"
                f" allow_inf={self._finding.module!r}"
            )
        if self._lineage.trouble is not None:
            remarks.append(self._lineage.trouble)
        return Examination(
            operation=None if step is None else step.operation,
            source=None if step is None else step.source,
            operands=() if step is None else step.operands,
            made=None if step is None or step.unwritten else "nan" if step.nan else "inf",
            transient=False,
            extent=describe(x),
            index=None if record.health is None else record.health.first_nonfinite,
            remarks=(*remarks, *(() if step is None else step.remarks), *guilty.remarks()),
            call=guilty.call,
            spreads=(*(() if step is None else step.spreads), *spreads_of(x, record.label)),
        )
