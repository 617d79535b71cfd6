"""Search for the operation that made a non-finite value: one re-run of the batch, forward and backward.

ProvenanceMode reads each operation of the run. The search looks at the tensor that the finding speaks of, an output or
an input of a module or a gradient, and asks which operation began its values. `BatchSnapshot.again` puts back what the
run has changed, and no gradient of the user's is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..instrumentation.functions import find_called
from ..instrumentation.wrapped_names import is_recorded, named_modules
from ..numerics.readable import inner_tensors, is_plain
from ..recording.observe import observe, state_of
from ..recording.walk import Leaf, call_leaves, leaves
from ..records.record import Frame, Record
from ..report.finding import Finding, value_of
from ..util.modules import is_in
from ..util.visible import spell
from .batch_snapshot import BatchSnapshot, left_calls, no_second_run
from .causes import came_in, named_arguments
from .diagnosis import Diagnosis, ModuleCall, Step, describe
from .experiment import Allows, make_call, nothing_allowed, run
from .isolation import RerunEndedError
from .provenance import ProvenanceMode

_NOTHING = "in a re-run of the batch no operation made a bad gradient"


def find_operation(
    snapshot: BatchSnapshot, finding: Finding, *, model: nn.Module, allows: Allows = nothing_allowed
) -> Diagnosis:
    """Run the batch of `finding` again and find the operation that made the non-finite value.

    `model` is the watched root, in which the names of the finding are names. `allows` tells which infinities are meant.
    A value that was in a weight is only described. For one that was in a buffer or the data, the operation that spreads
    it is found. Raises nothing of its own: what could not be done is a remark.
    """
    try:
        if finding.phase == "backward":
            return _of_backward(snapshot, finding, model, allows)
        called = find_called(model, finding.module)
        if finding.origin in ("weight", "buffer"):
            state = () if called is None else _tensors_of(called.module)
            x = next((x for _, label, x in state if label == finding.label), None)
            diagnosis = Diagnosis() if x is None else _of_tensor(x)
            return diagnosis if finding.origin == "weight" else _with_spread(diagnosis, snapshot)
        if finding.origin == "data":
            return _with_spread(_of_data(snapshot, finding), snapshot)
        if reason := no_second_run(snapshot.module):
            return Diagnosis(remarks=(f"no re-run was made: {reason}",))
        if called is None:
            return Diagnosis(remarks=(f"the model has no module {finding.module!r} any more",))
        return _of_forward(snapshot, finding, called.module, model)
    except Exception as error:
        return Diagnosis(remarks=(f"the finding could not be examined: {spell(error)}",))


# A value that was there before.


def _of_tensor(x: Tensor, **facts: Any) -> Diagnosis:
    """Return the diagnosis with what is known of the non-finite tensor itself."""
    health = observe(x, "", "output").health
    index = None if health is None else health.first_nonfinite
    return Diagnosis(extent=describe(x), index=index, **facts)


def _of_data(snapshot: BatchSnapshot, finding: Finding) -> Diagnosis:
    arguments = named_arguments(snapshot.module, snapshot.args, snapshot.kwargs)
    remarks = tuple(
        came_in(name, x) + (f": {words}" if (words := describe(x)) else "")
        for label, (name, x) in arguments.items()
        if observe(x, label, "input").is_fault
    )
    if finding.label not in arguments:
        return Diagnosis(remarks=remarks)
    return _of_tensor(arguments[finding.label][1], remarks=remarks)


def _with_spread(diagnosis: Diagnosis, snapshot: BatchSnapshot) -> Diagnosis:
    """Return the diagnosis of a value that was there before, with the operation that makes the most of it.

    It is the first to turn inf into nan, else the first product, which should have masked it, else the first operation
    that passed it on.
    """
    if no_second_run(snapshot.module):
        return diagnosis
    provenance = ProvenanceMode(run.__code__)
    run(replace(snapshot, grad=False), {}, follows=provenance)
    steps = [step for step in provenance.steps if step.place is not None]
    turned = [step for step in steps if step.turned]
    products = [step for step in steps if step.operation.startswith("aten.mul.")]
    return replace(diagnosis, step=next(iter([*turned, *products, *steps]), None))


# A value that the re-run makes again.


def _names(model: nn.Module) -> dict[nn.Module, str]:
    """Return the names of the modules whose calls are frames."""
    return {named.module: named.name for named in named_modules(model) if is_recorded(named.module)}


def _of_forward(snapshot: BatchSnapshot, finding: Finding, suspect: nn.Module, model: nn.Module) -> Diagnosis:
    # Without a graph it needs less memory. Where that raises, the forward may ask for one, as for a tensor's hook.
    for grad in (False, True) if snapshot.grad else (False,):
        search = _ForwardSearch(finding, suspect, model)
        error = search.run(replace(snapshot, grad=grad))
        failure = "" if error is None else f"it raised {spell(error)}"
        if isinstance(error, RerunEndedError):
            failure = str(error)
        if search.diagnosis is not None:
            return search.diagnosis
        if not failure:
            break
    doubts = snapshot.doubts()
    if failure:
        return Diagnosis(remarks=(f"the re-run of the batch ended: {failure}", *doubts))
    if not search.was_called:
        search.trouble.append(f"the re-run did not call {finding.module or 'the root module'}")
    if doubts:
        doubts.insert(0, "the re-run of the batch did not make the value again, which says little here")
    remarks = (*search.trouble, *doubts)
    return Diagnosis(transient=None if remarks else True, remarks=remarks)


class _ForwardSearch:
    """A re-run of a batch whose operations are read, up to where the value of the finding shows.

    The suspect is the module whose output or input the finding speaks of.
    """

    def __init__(self, finding: Finding, suspect: nn.Module, model: nn.Module) -> None:
        self.finding = finding
        self.names = {suspect: finding.module, **_names(model)}
        self.diagnosis: Diagnosis | None = None
        self.was_called = False
        self.trouble: list[str] = []
        self.provenance = ProvenanceMode(run.__code__)
        self._suspect = suspect
        self._is_producer = finding.origin == "produced"
        self._is_output = self._is_producer and not finding.label.startswith("input")

    def run(self, snapshot: BatchSnapshot) -> Exception | None:
        """Make the outermost call of the batch again. Return the error that ended it, if one did."""
        return run(snapshot, self.names, self._call, follows=self.provenance).error

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of a module, and look at the output or the input of the finding."""
        if self.diagnosis is not None or module not in self.names:
            return make_call(module, args, kwargs)
        *callers, call = self.provenance.open_calls
        is_suspect = module is self._suspect
        # A receiver that nobody called was called by the batch.
        guilty = call if self._is_producer or not callers else callers[-1]
        self.was_called = self.was_called or is_suspect
        if is_suspect and not self._is_producer:
            self._look(call_leaves(args, kwargs), guilty)
        try:
            result = make_call(module, args, kwargs)
        except Exception as error:  # of a hook that looks for such values itself
            left = [left.output for left in left_calls(error) if left.module is module]
            if is_suspect and self._is_output and left:
                self._look(leaves(left[-1], "output"), guilty)
            raise
        if is_suspect:
            # A record is made after the call, which may have written non-finite values into its own input.
            self._look(leaves(result, "output") if self._is_output else call_leaves(args, kwargs), guilty)
        return result

    def _look(self, given: Iterable[Leaf], guilty: ModuleCall) -> None:
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
        step = self._origin(x, record)
        self.provenance.active = False
        remarks = []
        made_in, maker = None, None if step is None else step.call
        is_inside = maker is not None and self._is_producer and is_in(maker.name, self.finding.module)
        if maker is not None and maker is not guilty and not is_inside:
            guilty, made_in = maker, maker.name
        if step is None:
            remarks.append("no operation that goes through PyTorch's dispatcher was seen to make the value")
        elif step.meant and x.numel() > 1:  # a single number is a loss, and no mask
            excuse = f"inf:{self.finding.module or '(root)'}"
            remarks.append(
                f"{step.operation} put {step.values} there; if that is meant, as in a mask, watch with"
                f" allow={excuse!r}"
            )
        if self.provenance.trouble is not None:
            remarks.append(self.provenance.trouble)
        remarks += () if step is None else step.remarks
        remarks += (
            f"the call wrote to its {label}, in place: what it was given is no longer there"
            for label, given, version in guilty.versions
            if given._version != version and label != self.finding.label
        )
        facts = {"transient": False, "remarks": tuple(remarks), "call": guilty, "made_in": made_in}
        diagnosis = _of_tensor(x, step=step, **facts)
        return diagnosis if step is None else self._of_holder(diagnosis, step.strangers)

    def _origin(self, x: Tensor, record: Record) -> Step | None:
        """Return the operation that began the values of a tensor, or wrote them, if they were there from the first."""
        step = self.provenance.origin(x, nan="nan" in value_of(record))
        is_written = self._is_producer and not self._is_output
        if is_written and step is not None and any(x.data_ptr() == y.data_ptr() for y in step.strangers):
            # The re-run began with what the first run wrote there.
            return self.provenance.last_write(x) or step
        return step

    def _of_holder(self, diagnosis: Diagnosis, strangers: Sequence[Tensor]) -> Diagnosis:
        """Return the diagnosis: of the weight or buffer that the operation was given non-finite, if it is one."""
        memory = {x.untyped_storage()._cdata for x in strangers if is_plain(x)}
        for module, name in self.names.items() if memory else ():
            for role, label, x in _tensors_of(module):
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


def _tensors_of(module: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield weights and buffers; of a quantized weight or another subclass the tensors that it is made of."""
    for role, name, tensor in state_of(module):
        for label, x in inner_tensors(tensor, name):
            yield role, label, x


# A gradient.


def _of_backward(snapshot: BatchSnapshot, finding: Finding, model: nn.Module, allows: Allows) -> Diagnosis:
    if reason := no_second_run(snapshot.module):
        return Diagnosis(remarks=(f"no re-run was made: {reason}",))
    guilty = finding.module if finding.origin == "produced" else finding.source_module
    experiment = run(replace(snapshot, grad=True), _names(model), allows=allows, follows=True)
    # A loss that overflows too is not what made a gradient inside the model.
    step = experiment.failure if guilty is None else experiment.bad_gradient
    error = experiment.error
    if step is None:
        remark = _NOTHING if error is None else f"the backward could not be examined: {spell(error)}"
        return Diagnosis(remarks=(remark, *snapshot.doubts()))
    if guilty is None and step.module is not None and not step.in_backward:
        # The loss read this auxiliary loss from an attribute, and the module has no bad gradient yet.
        remark = f"it was made in the forward of {f'`{step.module}`' if step.module else 'the model'}"
        return Diagnosis(step, remarks=(*step.remarks, remark))
    is_inside = step.module is None or (guilty is not None and is_in(step.module, guilty))
    return Diagnosis(step, remarks=step.remarks, made_in=None if is_inside else step.module)
