"""Re-run of a failed batch that reads each operation of the guilty call, to find which one made the value, and where.

The re-run builds no graph and leaves nothing behind: `BatchSnapshot.again` puts back what it changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
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
from ..report.histogram import StoredHistogram
from ..util.modules import is_in
from ..util.visible import spell
from .batch_snapshot import BatchSnapshot, left_calls, no_second_run
from .causes import argument_names, came_in
from .diagnosis import Diagnosis, ModuleCall, bad_rows, describe
from .in_process import RerunEndedError
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
            return _of_data(snapshot, finding)
        if reason := no_second_run(snapshot.module):
            return Diagnosis(remarks=(f"no re-run was made: {reason}",))
        return _of_rerun(snapshot, finding, model)
    except Exception as error:
        return Diagnosis(remarks=(f"the finding could not be examined: {spell(error)}",))


def _of_state(finding: Finding, model: nn.Module) -> Diagnosis:
    module = _module(model, finding.module)
    state = () if module is None else state_of(module)
    x = next((x for _, label, x in state if label == finding.label), None)
    if x is None:
        return Diagnosis()
    return Diagnosis(extent=describe(x), index=_first_nonfinite(x), spreads=_histograms(x, finding.label))


def _of_data(snapshot: BatchSnapshot, finding: Finding) -> Diagnosis:
    nonfinite = [
        (label, x)
        for label, x in call_leaves(snapshot.args, snapshot.kwargs)
        if isinstance(x, Tensor) and observe(x, label, "input").is_fault
    ]
    remarks = []
    names = argument_names(snapshot.module, snapshot.args, snapshot.kwargs)
    for label, x in nonfinite:
        words = describe(x)
        remarks.append(came_in(names[label], x) + (f": {words}" if words else ""))
        if any(x is given and x._version != version for _, given, version in snapshot.versions):
            remarks.append(f"{label} of the batch was written to, in place, since it began")
    found = _with_spread(Diagnosis(remarks=tuple(remarks)), snapshot)
    same = dict(nonfinite).get(finding.label)
    if same is None:
        return found
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


def _first_nonfinite(x: Tensor) -> tuple[int, ...] | None:
    health = observe(x, "", "output")[7]
    return None if health is None else health.first_nonfinite


def _of_rerun(snapshot: BatchSnapshot, finding: Finding, model: nn.Module) -> Diagnosis:
    suspect = _module(model, finding.module)
    if suspect is None:
        return Diagnosis(remarks=(f"the model has no module {finding.module!r} any more",))
    # A forward may ask for the graph, as for a tensor's hook. It is made only where the run without it raises.
    for builds_graph in (False, True) if snapshot.grad else (False,):
        probe = _CallProbe(finding, suspect, model)
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
    except RerunEndedError as error:
        return str(error)
    except Exception as error:
        return f"it raised {spell(error)}"
    return ""


def _written(call: ModuleCall) -> list[str]:
    """Name the arguments that the call wrote to."""
    return [
        f"the call wrote to its {label}, in place: what it was given is no longer there"
        for label, x, version in call.versions
        if x._version != version
    ]


def _module(model: nn.Module, name: str) -> nn.Module | None:
    found = find_called(model, name)
    return None if found is None else found.module


class _CallProbe:
    """Probe that follows the operations of the batch up to the call of the suspect, whose record was non-finite.

    The suspect is the module of the finding. Who made the value is known from the operation that began it.
    """

    def __init__(self, finding: Finding, suspect: nn.Module, model: nn.Module) -> None:
        self.finding = finding
        self.suspect = suspect
        self.found: Diagnosis | None = None
        self.was_called = False
        self.trouble: list[str] = []
        self._names = {one.module: one.name for one in named_modules(model) if is_recorded(one.module)}
        self._is_producer = finding.origin == "produced"
        # The calls under way, of the thread that makes the re-run.
        self._open: list[ModuleCall] = []
        self._provenance = ProvenanceMode(_run.__code__, self._open)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Examine the calls of the block."""
        try:
            with wrap_calls([*self._names, self.suspect], self._run), self._provenance:
                yield
        finally:
            self._provenance.active = False

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, and look at what the finding speaks of."""
        if self.found is not None:
            return module._call_impl(*args, **kwargs)
        name = self._names.get(module, self.finding.module)
        given = [(label, x) for label, x in call_leaves(args, kwargs) if isinstance(x, Tensor)]
        versions = tuple((label, x, x._version) for label, x in given if not x.is_inference())
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
            left = [one for one in left_calls(error) if one.module is module]
            if is_suspect and self._is_producer and left:
                self._look(leaves(left[-1].output, "output"), guilty)
            raise
        finally:
            self._open.pop()
        if is_suspect:
            # A record is made after the call, which may have written non-finite values into its own input.
            self._look(leaves(result, "output") if self._is_producer else call_leaves(args, kwargs), guilty)
        return result

    def _look(self, given: list[Leaf], guilty: ModuleCall) -> None:
        """Look for the value of the finding, and where it is there, settle what made it."""
        if self.found is not None:
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

    def _settled(self, x: Tensor, record: Record, guilty: ModuleCall) -> Diagnosis:
        step = self._provenance.origin(x, nan="nan" in value_of(record))
        self._provenance.active = False
        remarks = []
        made_in = None
        maker = None if step is None else step.call
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
        found = Diagnosis(
            operation=None if step is None else step.operation,
            place=None if step is None else step.place,
            operands=() if step is None else step.operands,
            made=None if step is None or step.unwritten else "nan" if step.nan else "inf",
            transient=False,
            extent=describe(x),
            index=None if record.health is None else record.health.first_nonfinite,
            remarks=(*remarks, *(() if step is None else step.remarks), *_written(guilty)),
            call=guilty,
            made_in=made_in,
            spreads=(*(() if step is None else step.spreads), *_histograms(x, record.label)),
            rows=(bad_rows(x), *(() if step is None else (step.rows,))),
        )
        return found if step is None else self._of_holder(found, step.strangers)

    def _of_holder(self, found: Diagnosis, strangers: Sequence[Tensor]) -> Diagnosis:
        """Return the diagnosis: of the weight or buffer that the operation was given non-finite, if it is one."""
        memory = {x.untyped_storage()._cdata for x in strangers if is_plain(x)}
        for module, name in self._names.items() if memory else ():
            for role, label, x in state_of(module):
                if not is_plain(x) or x.untyped_storage()._cdata not in memory:
                    continue
                record = observe(x, label, role)
                if record.is_fault:
                    frame = Frame(self.finding.batch, name, type(module).__name__, (record,))
                    return replace(
                        found,
                        holder=frame,
                        made_in=None,
                        transient=None,
                        extent=describe(x),
                        rows=(),
                        call=None,
                    )
        if any("nan" in value_of(record) for x in strangers if (record := observe(x, "", "input")).is_fault):
            return replace(found, transient=None)  # no change is a cure: it would hide what was there
        return found
