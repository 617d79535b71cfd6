"""The search for the operation that made a non-finite value, in a re-run of its batch.

ProvenanceMode reads each operation of one run, forward and backward. The search looks at the tensor that the finding
speaks of, an output or an input of a module or a gradient, and asks which operation began its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..instrumentation.functions import find_called
from ..instrumentation.wrapped_names import module_names
from ..numerics.readable import inner_tensors
from ..recording.observe import observe, state_of
from ..records.record import Frame, Record
from ..report.finding import Finding, finding_of
from ..util.messages import spell
from ..util.program import is_in
from .batch_snapshot import BatchSnapshot, no_second_run
from .causes import came_in, memory_of, named_arguments
from .data import describe
from .experiment import Allows, Experiment, nothing_allowed, run
from .provenance import Step, values_of


class Diagnosis(NamedTuple):
    """A finding as a re-run of its batch completed it, and what was seen beside it.

    `step` is the operation that made the value, None when none was seen. `call` is the call in which the value was
    made; it holds the call's tensors, so drop it when done. `holder` is a frame with the weight or buffer that the
    operation was given non-finite, whose finding it then is.
    """

    finding: Finding
    step: Step | None = None
    call: BatchSnapshot | None = None
    holder: Frame | None = None


def find_operation(
    snapshot: BatchSnapshot, finding: Finding, *, model: nn.Module, allows: Allows = nothing_allowed
) -> Diagnosis:
    """Run the batch of `finding` again and find the operation that made the non-finite value.

    `model` is the watched root, in which the names of the finding are names. `allows` tells which infinities are meant.
    A value that was in a weight is only described. For one that was in a buffer or the data, the operation that spreads
    it is found. Raises nothing of its own: what could not be done is a remark. The finding is `transient` when the
    re-run did not make the value again, not when it did, and None when that says nothing.
    """
    try:
        called, reason = find_called(model, finding.module), no_second_run(snapshot.module)
        module = None if called is None else called.module
        if finding.origin in ("weight", "buffer", "data"):
            may_run = not reason and finding.origin != "weight"
            # The model itself may fill what it was given, as it does a key-value cache, and then does so again.
            if may_run and "][" in finding.label and module is not None:
                made = of_forward(snapshot, replace(finding, origin="produced"), module, model, allows)
                if (step := made.step) is not None and step.call is not None and not step.strangers:
                    return made._replace(finding=_made_in(made.finding, step.call.name), call=step.call)
            return _of_present(finding, snapshot, module, may_run)
        is_backward = finding.phase == "backward"
        if module is None and not is_backward:
            reason = reason or f"the model has no module {finding.module!r} any more"
        if reason:
            return Diagnosis(_completed(finding, remarks=[f"no re-run was made: {reason}"]))
        if module is None or is_backward:
            return _of_backward(snapshot, finding, model, allows)
        return of_forward(snapshot, finding, module, model, allows)
    except Exception as error:
        return Diagnosis(_completed(finding, remarks=[f"the finding could not be examined: {spell(error)}"]))


def may_be_mask(record: Record | None) -> bool:
    """Return whether the record is one of an output with -inf, and with neither nan nor inf."""
    health = record.health if record is not None and record.role == "output" else None
    return health is not None and bool(health.num_neginf) and not health.num_nan + health.num_posinf


def place_of_mask(snapshot: BatchSnapshot, finding: Finding, *, model: nn.Module, allows: Allows) -> str:
    """Return the line that wrote the -inf of an output as a number, as a mask of scores is; "" where none did.

    A row of nothing else is no mask.
    """
    (finding, step, *_), asked = find_operation(snapshot, finding, model=model, allows=allows), finding.module
    is_written = step is not None and step.meant and "log" not in step.operation and finding.module == asked
    is_row = finding.extent == "all" or ("rows" in finding.extent and "scattered" not in finding.extent)
    return str(finding.place or "") if is_written and not is_row else ""


def _completed(
    finding: Finding,
    x: Tensor | None = None,
    step: Step | None = None,
    remarks: Sequence[str] = (),
    transient: bool | None = None,
) -> Finding:
    """Return the finding with where in `x` its values are, the operation of the step, and more remarks."""
    facts: dict[str, Any] = {"transient": transient, "remarks": (*finding.remarks, *remarks)}
    if x is not None:
        facts["extent"], health = describe(x), observe(x, "", "output").health
        if finding.index is None and health is not None:
            facts["index"] = health.first_nonfinite
    if step is not None:
        facts |= {"operation": step.operation, "operands": step.operands, "made": step.made}
        facts["place"] = finding.place if step.place is None else step.place.at
    return replace(finding, **facts)


def _made_in(finding: Finding, module: str) -> Finding:
    """Return the finding of a value that the code of another module than its origin made, or its own."""
    source, origin = (None, "produced") if module == finding.module else (module, "received")
    return replace(finding, origin=origin, source_module=source)  # type: ignore[arg-type]


# A value that was there before


def _came_in(call: BatchSnapshot) -> list[str]:
    bad = [(name, x) for name, x in named_arguments(call) if observe(x, name, "input").is_fault]
    return [": ".join(filter(None, (came_in(name, x), describe(x)))) for name, x in bad]


def _of_present(
    finding: Finding, snapshot: BatchSnapshot, module: nn.Module | None, may_run: bool
) -> Diagnosis:
    """Say where in a weight, a buffer or the data the values are, and find the operation that makes the most of them.

    It is the first to turn inf into nan, else the first product, which should have masked it, else the first operation
    that passed it on.
    """
    tensors, remarks = dict[str, Tensor](), list[str]()
    if finding.origin == "data":
        tensors, remarks = snapshot.tensors(), _came_in(snapshot)
    elif module is not None:
        tensors = {label: x for _, label, x in _tensors_of(module)}
    provenance = run(replace(snapshot, grad=False), {}, follows=True).provenance if may_run else None
    steps = [] if provenance is None else [x for x in provenance.steps if x.place is not None]
    turned = [x for x in steps if "nan" in x.values and all("nan" not in values_of(y) for y in x.operands)]
    products = [step for step in steps if step.operation.startswith("aten.mul.")]
    step = next(iter([*turned, *products, *steps]), None)
    return Diagnosis(_completed(finding, tensors.get(finding.label), step, remarks), step)


# A value that the re-run makes again


def of_forward(
    snapshot: BatchSnapshot, finding: Finding, suspect: nn.Module, model: nn.Module, allows: Allows
) -> Diagnosis:
    """Find what made the value of the finding in a call of the suspect, whose output or input it is."""
    names = {suspect: finding.module, **module_names(model)}
    # An infinity counts where the batch had a nan: with fewer threads a product adds up in another order.
    sought = suspect, finding.label
    # Without a graph it needs less memory. Where that raises, the forward may need a graph, as for a tensor's hook.
    for grad in sorted({False, snapshot.grad}):
        experiment = run(replace(snapshot, grad=grad), names, allows=allows, follows=True, sought=sought)
        if experiment.fault is not None:
            return _of_fault(finding, names, experiment)
        if experiment.error is None:
            break
    remarks, doubts, error = list[str](), snapshot.doubts(), experiment.error
    if error is not None:
        remarks.append(f"the re-run of the batch ended: it raised {spell(error)}")
    elif all(call.name != finding.module for call in experiment.calls):
        remarks.append(f"the re-run did not call {finding.module or 'the root module'}")
    if doubts and error is None:
        remarks.append("the re-run of the batch did not make the value again, which says little here")
    remarks += doubts
    return Diagnosis(_completed(finding, remarks=remarks, transient=None if remarks else True))


def _of_fault(finding: Finding, names: Mapping[nn.Module, str], experiment: Experiment) -> Diagnosis:
    """Find what made the tensor that is the fault of the run, in its call or in the caller of that."""
    assert experiment.fault is not None
    assert experiment.provenance is not None
    (x, call, caller), step, provenance = experiment.fault, experiment.failure, experiment.provenance
    is_producer = finding.origin == "produced"
    guilty, completed = call if is_producer else caller, finding
    maker = None if step is None else step.call
    is_inside = maker is not None and is_producer and is_in(maker.name, finding.module)
    if maker is not None and maker is not guilty and not is_inside:
        guilty, completed = maker, _made_in(finding, maker.name)
    remarks = list[str]()
    if step is None and finding.operation is None:
        remarks.append("no operation that goes through PyTorch's dispatcher was seen to make the value")
    elif step is not None and step.meant and x.numel() > 1:  # a single number is a loss, and no mask
        excuse = f"inf:{finding.module or '(root)'}"
        advice = f"if that is meant, as in a mask, watch with allow={excuse!r}"
        remarks.append(f"{step.operation} put {step.spelt} there; {advice}")
    remarks += [] if provenance.trouble is None else [provenance.trouble]
    remarks += () if step is None else step.remarks
    written = (label for label in guilty.written() if label != finding.label)
    remarks += (f"the call wrote to its {x}, in place: what it was given is no longer there" for x in written)
    strangers = () if step is None else step.strangers
    memory = {memory_of(y) for y in strangers}
    for module, name in names.items() if memory else ():
        for role, label, y in _tensors_of(module):
            if memory_of(y) in memory and (record := observe(y, label, role)).is_fault:
                holder = Frame(finding.batch, name, type(module).__name__, (record,))
                state = finding_of(holder, record, role, None, finding.rank, finding.sequence)
                state = replace(state, remarks=finding.remarks)
                return Diagnosis(_completed(state, y, step, remarks), step, None, holder)
    # No change is a cure of a nan that was there: it would hide that.
    was_nan = any("nan" in values_of(observe(y, "", "input")) for y in strangers)
    return Diagnosis(_completed(completed, x, step, remarks, None if was_nan else False), step, guilty)


def _tensors_of(module: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield weights and buffers; of a quantized weight or another subclass the tensors that it is made of."""
    for role, name, tensor in state_of(module):
        for label, x in inner_tensors(tensor, name):
            yield role, label, x


def _of_backward(snapshot: BatchSnapshot, finding: Finding, model: nn.Module, allows: Allows) -> Diagnosis:
    guilty = finding.module if finding.origin == "produced" else finding.source_module
    experiment = run(replace(snapshot, grad=True), module_names(model), allows=allows, follows=True)
    # A loss that overflows too is not what made a gradient inside the model.
    step = experiment.failure if guilty is None else experiment.bad_gradient
    if step is None:
        error = experiment.error
        nothing = "in a re-run of the batch no operation made a bad gradient"
        remark = nothing if error is None else f"the backward could not be examined: {spell(error)}"
        return Diagnosis(_completed(finding, remarks=[remark, *snapshot.doubts()]))
    remarks, data = [*step.remarks], getattr(snapshot.module, "data", {})
    # No statement makes a bad operand.
    is_given = step.strangers and all(x.grad_fn is None for x in step.strangers)
    if finding.is_of_loss and data and is_given:
        finding = replace(finding, origin="data")
        remarks = _came_in(replace(snapshot, args=(), kwargs=data))
    elif (
        guilty is None and finding.label[:6] == "output" and step.module is not None and not step.in_backward
    ):
        # The loss read this auxiliary loss from an attribute, and the module has no bad gradient yet.
        remarks.append(f"it was made in the forward of {f'`{step.module}`' if step.module else 'the model'}")
    elif step.module is not None and not (guilty is not None and is_in(step.module, guilty)):
        finding = _made_in(finding, step.module)
    return Diagnosis(_completed(finding, step=step, remarks=remarks), step)
