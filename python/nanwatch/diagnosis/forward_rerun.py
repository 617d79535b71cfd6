"""Re-run of a failed batch that reads each operation of the guilty call, to find which one made the value, and where.

The re-run builds no graph and leaves nothing behind: `BatchSnapshot.again` puts back what it changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..instrumentation.execution_context import Autocast, RngState
from ..instrumentation.functions import find_called
from ..instrumentation.slot import wrap_calls
from ..instrumentation.wrapped_names import is_recorded, named_modules
from ..numerics.readable import is_plain
from ..recording.observe import histogram_of, observe, state_of
from ..recording.walk import Leaf, call_leaves, leaves
from ..records.record import Frame, Record
from ..report.finding import Finding, value_of
from ..util.modules import is_in
from ..util.visible import spell
from .batch_snapshot import BatchSnapshot, left_calls, no_second_run
from .causes import came_in, named_arguments
from .diagnosis import Diagnosis, ModuleCall, describe
from .in_process import RerunEndedError
from .provenance import ProvenanceMode


def rerun_forward(snapshot: BatchSnapshot, finding: Finding, *, model: nn.Module) -> Diagnosis:
    """Run the batch of `finding` again and find the operation that made the non-finite value.

    `model` is the watched root, in which the names of the finding are names. Takes one run of the batch, in which the
    operations are read, inputs and outputs. A value that was in a weight is only described. For one that was in a
    buffer or the data, the operation that spreads it is found. Raises nothing of its own: what could not be done is a
    remark.
    """
    try:
        called = find_called(model, finding.module)
        if finding.origin in ("weight", "buffer"):
            state = () if called is None else state_of(called.module)
            x = next((x for _, label, x in state if label == finding.label), None)
            diagnosis = Diagnosis() if x is None else _of_tensor(x, finding.label)
            return diagnosis if finding.origin == "weight" else _with_spread(diagnosis, snapshot)
        if finding.origin == "data":
            return _with_spread(_of_data(snapshot, finding), snapshot)
        if reason := no_second_run(snapshot.module):
            return Diagnosis(remarks=(f"no re-run was made: {reason}",))
        if called is None:
            return Diagnosis(remarks=(f"the model has no module {finding.module!r} any more",))
        return _of_rerun(snapshot, finding, called.module, model)
    except Exception as error:
        return Diagnosis(remarks=(f"the finding could not be examined: {spell(error)}",))


def _of_tensor(x: Tensor, label: str, **facts: Any) -> Diagnosis:
    """Return the diagnosis with what is known of the non-finite tensor itself."""
    health, spread = observe(x, "", "output").health, histogram_of(x, label)
    return Diagnosis(
        extent=describe(x),
        index=None if health is None else health.first_nonfinite,
        spreads=() if spread is None else (spread,),
        **facts,
    )


def _of_data(snapshot: BatchSnapshot, finding: Finding) -> Diagnosis:
    arguments = named_arguments(snapshot.module, snapshot.args, snapshot.kwargs)
    remarks = [
        came_in(name, x) + (f": {words}" if (words := describe(x)) else "")
        for label, (name, x) in arguments.items()
        if observe(x, label, "input").is_fault
    ]
    _, x = arguments.get(finding.label, ("", None))
    return (
        Diagnosis(remarks=tuple(remarks))
        if x is None
        else _of_tensor(x, finding.label, remarks=tuple(remarks))
    )


def _with_spread(diagnosis: Diagnosis, snapshot: BatchSnapshot) -> Diagnosis:
    """Return the diagnosis of a value that was there before, with the operation that makes the most of it.

    It is the first to turn inf into nan, else the first product, which should have masked it, else the first operation
    that passed it on.
    """
    if no_second_run(snapshot.module):
        return diagnosis
    mode = ProvenanceMode(_with_spread.__code__, keeps_steps=True)
    with suppress(Exception), snapshot.again() as call, mode:
        call()
    steps = [step for step in mode.steps if step.place is not None]
    turned = [step for step in steps if step.turned]
    products = [step for step in steps if step.operation.startswith("aten.mul.")]
    step = next(iter([*turned, *products, *steps]), None)
    if step is None:
        return diagnosis
    return replace(diagnosis, operation=step.operation, place=step.place, operands=step.operands)


def _of_rerun(snapshot: BatchSnapshot, finding: Finding, suspect: nn.Module, model: nn.Module) -> Diagnosis:
    # A forward may ask for the graph, as for a tensor's hook. It is made only where the run without it raises.
    for builds_graph in (False, True) if snapshot.grad else (False,):
        probe = _CallProbe(finding, suspect, model)
        failure = probe.run(snapshot, builds_graph)
        if probe.diagnosis is not None or not failure:
            break
    if probe.diagnosis is not None:
        return probe.diagnosis
    if failure:
        return Diagnosis(remarks=(f"the re-run of the batch ended: {failure}", *snapshot.doubts()))
    if not probe.was_called:
        probe.trouble.append(f"the re-run did not call {finding.module or 'the root module'}")
    if doubts := snapshot.doubts():
        doubts.insert(0, "the re-run of the batch did not make the value again, which says little here")
    return Diagnosis(transient=None if doubts or probe.trouble else True, remarks=(*probe.trouble, *doubts))


class _CallProbe:
    """Probe that follows the operations of the batch up to the call of the suspect, whose record was non-finite.

    The suspect is the module of the finding. Who made the value is known from the operation that began it.
    """

    def __init__(self, finding: Finding, suspect: nn.Module, model: nn.Module) -> None:
        self.finding = finding
        self.suspect = suspect
        self.diagnosis: Diagnosis | None = None
        self.was_called = False
        self.trouble: list[str] = []
        self._names = {
            named.module: named.name for named in named_modules(model) if is_recorded(named.module)
        }
        self._is_producer = finding.origin == "produced"
        self._is_output = self._is_producer and not finding.label.startswith("input")
        self._versions: dict[int, int] = {}  # of what the batch was called with, by id
        # The calls under way, of the thread that makes the re-run.
        self._open: list[ModuleCall] = []
        self._is_written = self._is_producer and not self._is_output
        self._provenance = ProvenanceMode(_CallProbe.run.__code__, self._open, keeps_steps=self._is_written)

    def run(self, snapshot: BatchSnapshot, builds_graph: bool) -> str:
        """Make the outermost call of the batch again, and examine the calls in it. Return what it raised, in words."""
        self._versions = {id(x): version for _, x, version in snapshot.versions}
        try:
            graph = torch.enable_grad() if builds_graph else nullcontext()
            wrapped = wrap_calls([*self._names, self.suspect], self._call)
            with snapshot.again() as call, graph, wrapped, self._provenance:
                call()
        except RerunEndedError as error:
            return str(error)
        except Exception as error:
            return f"it raised {spell(error)}"
        finally:
            self._provenance.active = False
        return ""

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, and look at what the finding speaks of."""
        if self.diagnosis is not None:
            return module._call_impl(*args, **kwargs)
        name = self._names.get(module, self.finding.module)
        given = [(label, x) for label, x in call_leaves(args, kwargs) if isinstance(x, Tensor)]
        versions = tuple(
            (label, x, self._versions.get(id(x), x._version)) for label, x in given if not x.is_inference()
        )
        call = ModuleCall(name, module, args, kwargs, RngState.capture(), Autocast.capture(), versions)
        is_suspect = module is self.suspect
        # A receiver that nobody called was called by the batch.
        guilty = call if self._is_producer or not self._open else self._open[-1]
        self.was_called = self.was_called or is_suspect
        if is_suspect and not self._is_producer:
            self._look(call_leaves(args, kwargs), guilty)
        self._open.append(call)
        try:
            result = module._call_impl(*args, **kwargs)
        except Exception as error:  # of a hook that looks for such values itself
            left = [left.output for left in left_calls(error) if left.module is module]
            if is_suspect and self._is_output and left:
                self._look(leaves(left[-1], "output"), guilty)
            raise
        finally:
            self._open.pop()
        if is_suspect:
            # A record is made after the call, which may have written non-finite values into its own input.
            self._look(leaves(result, "output") if self._is_output else call_leaves(args, kwargs), guilty)
        return result

    def _look(self, given: list[Leaf], guilty: ModuleCall) -> None:
        """Look for the value of the finding, and where it is there, settle what made it."""
        try:
            for label, x in given if self.diagnosis is None else ():
                if label != self.finding.label or not isinstance(x, Tensor):
                    continue
                record = observe(x, label, "output" if self._is_output else "input")
                # Where infinities are allowed, earlier calls may have had some.
                if record.is_fault and ("nan" not in self.finding.value or "nan" in value_of(record)):
                    self.diagnosis = self._settled(x, record, guilty)
        except Exception as error:
            self.trouble.append(f"{self.finding.label} could not be looked at: {spell(error)}")

    def _settled(self, x: Tensor, record: Record, guilty: ModuleCall) -> Diagnosis:
        step = self._provenance.origin(x, nan="nan" in value_of(record))
        if (
            self._is_written
            and step is not None
            and any(x.data_ptr() == y.data_ptr() for y in step.strangers)
        ):
            # The re-run began with what the first run wrote there.
            step = self._provenance.last_write(x) or step
        self._provenance.active = False
        remarks = []
        made_in, maker = None, None if step is None else step.call
        is_inside = maker is not None and self._is_producer and is_in(maker.name, self.finding.module)
        if maker is not None and maker is not guilty and not is_inside:
            guilty, made_in = maker, maker.name
        if step is None:
            remarks.append("no operation that goes through PyTorch's dispatcher was seen to make the value")
        elif step.meant and x.numel() > 1:  # a single number is a loss, and no mask
            remarks.append(
                f"{step.operation} put {step.values} there, on purpose as it seems; if so, watch with"
                f" allow_inf={self.finding.module!r}"
            )
        if self._provenance.trouble is not None:
            remarks.append(self._provenance.trouble)
        remarks += () if step is None else step.remarks
        remarks += (
            f"the call wrote to its {label}, in place: what it was given is no longer there"
            for label, given, version in guilty.versions
            if given._version != version and label != self.finding.label
        )
        diagnosis = _of_tensor(
            x, record.label, transient=False, remarks=tuple(remarks), call=guilty, made_in=made_in
        )
        if step is None:
            return diagnosis
        diagnosis = replace(
            diagnosis,
            operation=step.operation,
            place=step.place,
            operands=step.operands,
            made=step.made,
            spreads=(*step.spreads, *diagnosis.spreads),
        )
        return self._of_holder(diagnosis, step.strangers)

    def _of_holder(self, diagnosis: Diagnosis, strangers: Sequence[Tensor]) -> Diagnosis:
        """Return the diagnosis: of the weight or buffer that the operation was given non-finite, if it is one."""
        memory = {x.untyped_storage()._cdata for x in strangers if is_plain(x)}
        for module, name in self._names.items() if memory else ():
            state = [
                (role, *inner) for role, label, x in state_of(module) for inner in _inner_tensors(label, x)
            ]
            for role, label, x in state:
                if not is_plain(x) or x.untyped_storage()._cdata not in memory:
                    continue
                record = observe(x, label, role)
                if record.is_fault:
                    holder = Frame(self.finding.batch, name, type(module).__name__, (record,))
                    extent = describe(x)
                    return replace(
                        diagnosis, holder=holder, made_in=None, transient=None, extent=extent, call=None
                    )
        if any("nan" in value_of(record) for x in strangers if (record := observe(x, "", "input")).is_fault):
            return replace(diagnosis, transient=None)  # no change is a cure: it would hide what was there
        return diagnosis


def _inner_tensors(label: str, x: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensor with its label; of a quantized weight or another subclass those that it is made of."""
    if is_plain(x) or not hasattr(x, "__tensor_flatten__"):
        return [(label, x)]
    return [(f"{label}.{name}", getattr(x, name)) for name in x.__tensor_flatten__()[0]]
