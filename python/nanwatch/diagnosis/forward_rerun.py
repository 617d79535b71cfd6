"""Re-run of a failed batch that reads each operation of the guilty call, to find which one made the value, and where.

The re-run builds no graph and leaves nothing behind: `BatchSnapshot.again` puts back what it changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..instrumentation.execution_context import Autocast, RngState
from ..instrumentation.functions import find_called
from ..instrumentation.slot import wrap_calls
from ..instrumentation.wrapped_names import name_of, unwrapped
from ..recording.observe import histogram_of, observe
from ..recording.walk import Leaf, call_leaves, leaves
from ..records.record import Record
from ..report.finding import Finding, value_of
from ..report.histogram import StoredHistogram
from ..util.visible import spell
from .batch_snapshot import BatchSnapshot, left_calls, no_second_run
from .diagnosis import Diagnosis, ModuleCall, bad_rows, describe
from .outside import NotRepeatableError
from .provenance import ProvenanceMode


def rerun_forward(snapshot: BatchSnapshot, finding: Finding, *, model: nn.Module) -> Diagnosis:
    """Run the batch of `finding` again and find the operation that made the non-finite value.

    `model` is the watched root, in which the names of the finding are names. Takes one run of the batch, in which the
    operations of the guilty module's calls are read, inputs and outputs. A value that was in a weight is only
    described. For one that was in a buffer or the data, the operation that spreads it is found. Raises nothing of its
    own: what could not be done is a remark.
    """
    try:
        if finding.origin in ("weight", "buffer"):
            found = _of_state(finding, model)
            return found if finding.origin == "weight" else _with_spread(found, snapshot)
        if finding.origin == "data":
            return _of_data(snapshot, finding, model)
        if reason := no_second_run(snapshot.module):
            return Diagnosis(remarks=(f"no re-run was made: {reason}",))
        return _of_rerun(snapshot, finding, model)
    except Exception as error:
        return Diagnosis(remarks=(f"the finding could not be examined: {spell(error)}",))


def _of_state(finding: Finding, model: nn.Module) -> Diagnosis:
    module = _module(model, finding.module)
    own = {} if module is None else {**module._parameters, **module._buffers}
    x = own.get(finding.label)
    if x is None:
        return Diagnosis()
    return Diagnosis(extent=describe(x), index=_first_nonfinite(x), spreads=_histograms(x, finding.label))


def _of_data(snapshot: BatchSnapshot, finding: Finding, model: nn.Module) -> Diagnosis:
    nonfinite = [
        (label, x)
        for label, x in call_leaves(snapshot.args, snapshot.kwargs)
        if isinstance(x, Tensor) and observe(x, label, "input").is_fault
    ]
    remarks = []
    for label, x in nonfinite:
        words = describe(x)
        remarks.append(f"{label} of the batch is not finite" + (f": {words}" if words else ""))
        if any(x is given and x._version != version for _, given, version in snapshot.versions):
            remarks.append(f"{label} of the batch was written to, in place, since it began")
    # The label of an inner call belongs to that module, so its value is found by where it is non-finite.
    is_outermost = _module(model, finding.module) is unwrapped(snapshot.module)
    same = (
        dict(nonfinite).get(finding.label)
        if is_outermost
        else next((x for _, x in nonfinite if _is_that(x, finding)), None)
    )
    found = _with_spread(Diagnosis(remarks=tuple(remarks)), snapshot)
    if same is None:
        # The model has given it another shape.
        return replace(
            found, extent=next((f"of {label} of the batch: {describe(x)}" for label, x in nonfinite), "")
        )
    return replace(
        found,
        extent=describe(same),
        index=_first_nonfinite(same),
        spreads=_histograms(same, finding.label),
        rows=(bad_rows(same),),
    )


def _with_spread(found: Diagnosis, snapshot: BatchSnapshot) -> Diagnosis:
    """Return the diagnosis of a value that was there before, with the operation that makes the most of it.

    It is the first to turn inf into nan, else the first product, which should have masked it, else the first operation
    that passed it on.
    """
    if no_second_run(snapshot.module):
        return found
    mode = ProvenanceMode(_with_spread.__code__, keeps_steps=True)
    with suppress(Exception), snapshot.again() as call, mode:
        call()
    steps = [one for one in mode.steps or () if one.place is not None]
    turned = [one for one in steps if one.turned]
    products = [one for one in steps if one.operation.startswith("aten.mul.")]
    step = next(iter([*turned, *products, *steps]), None)
    if step is None:
        return found
    return replace(found, operation=step.operation, place=step.place, operands=step.operands)


def _histograms(x: Tensor, label: str) -> tuple[StoredHistogram, ...]:
    found = histogram_of(x, label)
    return () if found is None else (found,)


def _is_that(x: Tensor, finding: Finding) -> bool:
    """Return whether `x` may be the finding's tensor: as large, as many non-finite places, the first the same."""
    health = observe(x, "", "output")[7]
    if health is None or finding.index is None:
        return False
    num_nonfinite = health.num_nan + health.num_posinf + health.num_neginf
    return (health.numel, num_nonfinite, health.first_nonfinite) == (
        finding.numel,
        finding.num_nonfinite,
        finding.index,
    )


def _first_nonfinite(x: Tensor) -> tuple[int, ...] | None:
    health = observe(x, "", "output")[7]
    return None if health is None else health.first_nonfinite


def _of_rerun(snapshot: BatchSnapshot, finding: Finding, model: nn.Module) -> Diagnosis:
    suspect = _module(model, finding.module)
    if suspect is None:
        return Diagnosis(remarks=(f"the model has no module {finding.module!r} any more",))
    examined: nn.Module | None
    name = finding.module if finding.origin == "produced" else finding.source_module
    if name is None:
        examined, name = snapshot.module, name_of(model, snapshot.module)
    else:
        examined = _module(model, name)
    if examined is None:
        return Diagnosis(remarks=(f"the model has no module {name!r} any more",))
    # A forward may ask for the graph, as for a tensor's hook. It is made only where the run without it raises.
    for builds_graph in (False, True) if snapshot.grad else (False,):
        probe = _CallProbe(finding, suspect, examined, name, ProvenanceMode(_run.__code__))
        failure = _run(probe, snapshot, builds_graph)
        if probe.found is not None or not failure:
            break
    if probe.found is not None:
        return probe.found
    if failure:
        return Diagnosis(remarks=(f"the re-run of the batch ended: {failure}", *snapshot.doubts()))
    if not probe.was_called:
        probe.trouble.append(f"the re-run did not call {finding.module or 'the root module'}")
    if doubts := snapshot.doubts():
        doubts.insert(0, "the re-run of the batch did not make the value again, which says little here")
    return Diagnosis(transient=None if doubts or probe.trouble else True, remarks=(*probe.trouble, *doubts))


def _run(probe: _CallProbe, snapshot: BatchSnapshot, builds_graph: bool) -> str:
    """Make the outermost call of the batch again under the probe. Return what it raised, in words, or ""."""
    try:
        graph = torch.enable_grad() if builds_graph else nullcontext()
        with snapshot.again() as call, graph, probe.in_place():
            call()
    except NotRepeatableError as error:
        return str(error)
    except Exception as error:
        return f"it raised {spell(error)}"
    return ""


def _module(model: nn.Module, name: str) -> nn.Module | None:
    found = find_called(model, name)
    return None if found is None else found.module


class _Guilty:
    """A call, and what shows whether it wrote to what it was given."""

    def __init__(self, call: ModuleCall) -> None:
        self.call = call
        given = [(label, x) for label, x in call_leaves(call.args, call.kwargs) if isinstance(x, Tensor)]
        self.versions = [(label, x, x._version) for label, x in given if not x.is_inference()]

    def remarks(self) -> list[str]:
        """Name the arguments that the call wrote to."""
        return [
            f"the call wrote to its {label}, in place: what it was given is no longer there"
            for label, x, version in self.versions
            if x._version != version
        ]


@dataclass
class _CallProbe:
    """Probe on the calls of the suspect, whose record was non-finite, and of the module that is examined for the cause.

    When the suspect produced the value they are one; else the examined module is the one that called the suspect.
    """

    finding: Finding
    suspect: nn.Module
    examined: nn.Module
    name: str
    provenance: ProvenanceMode

    def __post_init__(self) -> None:
        self.found: Diagnosis | None = None
        self.was_called = False
        self.trouble: list[str] = []
        self._is_producer = self.finding.origin == "produced"
        # The calls of the examined module: all of the thread that makes the re-run.
        self._under_way: list[_Guilty] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Examine the calls of both modules in the block."""
        try:
            with wrap_calls([self.suspect, self.examined], self._run):
                yield
        finally:
            self.provenance.active = False

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, and look at what the finding speaks of."""
        if self.found is not None:
            return module._call_impl(*args, **kwargs)
        own = None
        if module is self.examined:
            own = _Guilty(ModuleCall(self.name, module, args, kwargs, RngState.capture(), Autocast.capture()))
        # A receiver that nobody called was called by the batch.
        guilty = own if self._is_producer or not self._under_way else self._under_way[-1]
        is_receiver = not self._is_producer and module is self.suspect
        self.was_called = self.was_called or module is self.suspect
        if is_receiver:
            self._look(call_leaves(args, kwargs), guilty)
        try:
            result = module._call_impl(*args, **kwargs) if own is None else self._call_traced(own)
        except Exception as error:  # of a hook that looks for such values itself
            left = [call for call in left_calls(error) if call.module is module]
            if self._is_producer and left:
                self._look(leaves(left[-1].output, "output"), guilty)
            raise
        if self._is_producer:
            self._look(leaves(result, "output"), guilty)
        elif is_receiver:
            # A record is made after the call, which may have written non-finite values into its own input.
            self._look(call_leaves(args, kwargs), guilty)
        return result

    def _call_traced(self, own: _Guilty) -> Any:
        self._under_way.append(own)
        try:
            with nullcontext() if len(self._under_way) > 1 else self.provenance:
                return own.call.module._call_impl(*own.call.args, **own.call.kwargs)
        finally:
            self._under_way.pop()

    def _look(self, given: list[Leaf], guilty: _Guilty | None) -> None:
        """Look for the value of the finding, and where it is there, settle what made it."""
        if self.found is not None or guilty is None:
            return
        try:
            for label, x in given:
                if label != self.finding.label or not isinstance(x, Tensor):
                    continue
                record = observe(x, label, "output" if self._is_producer else "input")
                # Where infinities are allowed, earlier calls may have had some.
                if record.is_fault and ("nan" not in self.finding.value or "nan" in value_of(record)):
                    self.found = self._settled(x, record, guilty)
        except Exception as error:
            self.trouble.append(f"{self.finding.label} could not be looked at: {spell(error)}")

    def _settled(self, x: Tensor, record: Record, guilty: _Guilty) -> Diagnosis:
        step = self.provenance.origin(x, nan="nan" in value_of(record))
        self.provenance.active = False
        remarks = []
        if step is None:
            remarks.append("no operation that goes through PyTorch's dispatcher was seen to make the value")
        elif step.meant and x.numel() > 1:  # a single number is a loss, and no mask
            remarks.append(
                f"{step.operation} put {step.values} there, on purpose as it seems; if so, watch with"
                f" allow_inf={self.finding.module!r}"
            )
        if self.provenance.trouble is not None:
            remarks.append(self.provenance.trouble)
        return Diagnosis(
            operation=None if step is None else step.operation,
            place=None if step is None else step.place,
            operands=() if step is None else step.operands,
            made=None if step is None or step.unwritten else "nan" if step.nan else "inf",
            transient=False,
            extent=describe(x),
            index=None if record.health is None else record.health.first_nonfinite,
            remarks=(*remarks, *(() if step is None else step.remarks), *guilty.remarks()),
            call=guilty.call,
            spreads=(*(() if step is None else step.spreads), *_histograms(x, record.label)),
            rows=(bad_rows(x), *(() if step is None else (step.rows,))),
        )
