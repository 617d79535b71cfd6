"""Search for the operation that made a non-finite value: one re-run of the batch, forward and backward.

ProvenanceMode reads each operation of the run. The search looks at the tensor that the finding speaks of, an output or
an input of a module or a gradient, and asks which operation began its values. `BatchSnapshot.again` puts back what the
run has changed, and no gradient of the user's is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..instrumentation.functions import find_called
from ..instrumentation.wrapped_names import module_names
from ..numerics import _reference
from ..numerics.readable import inner_tensors, is_plain, local_shard, only_our_dispatch, unreadable
from ..recording.observe import observe, state_of
from ..records.record import Frame
from ..report.finding import Finding, OriginKind, finding_of
from ..util.modules import is_in
from ..util.visible import spell
from .batch_snapshot import BatchSnapshot, no_second_run
from .causes import came_in, named_arguments
from .experiment import Allows, Experiment, nothing_allowed, run
from .operation import Step, values_of


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Facts about a finding that a re-run of its batch showed.

    `step` is the operation that made the non-finite value, None when none was seen. `transient` is True when the re-run
    did not make the value again, False when it did, None when that says nothing. `extent` and `index` are of the
    non-finite tensor. `call` is the call in which the value was made; it holds the call's tensors, so drop it when
    done. `remarks` are sentences. `made_in` is the module whose own code made the operation, where that is another than
    the finding's and not inside it. `holder` is a frame with the weight or buffer that the operation was given
    non-finite.
    """

    step: Step | None = None
    transient: bool | None = None
    extent: str = ""
    index: tuple[int, ...] | None = None
    remarks: tuple[str, ...] = ()
    call: BatchSnapshot | None = None
    made_in: str | None = None
    holder: Frame | None = None


def enrich(finding: Finding, diagnosis: Diagnosis) -> Finding:
    """Return the finding with the facts of the diagnosis, and those of its own that the diagnosis has not."""
    if (holder := diagnosis.holder) is not None and (record := holder.fault) is not None:
        origin: OriginKind = "weight" if record.role == "weight" else "buffer"
        state = finding_of(holder, record, origin, None, finding.rank, finding.sequence)
        finding = replace(state, remarks=finding.remarks)
    made_in = diagnosis.made_in
    if made_in == finding.module:  # which wrote it into what it was given
        finding = replace(finding, origin="produced", source_module=None)
    elif made_in is not None:
        finding = replace(finding, origin="received", source_module=made_in)
    if (step := diagnosis.step) is not None:
        place = finding.place if step.place is None else step.place.at
        operation, operands = step.operation, step.operands
        finding = replace(finding, operation=operation, place=place, operands=operands, made=step.made)
    return replace(
        finding,
        transient=diagnosis.transient,
        extent=diagnosis.extent,
        index=diagnosis.index if finding.index is None else finding.index,
        remarks=(*finding.remarks, *diagnosis.remarks),
    )


def find_operation(
    snapshot: BatchSnapshot, finding: Finding, *, model: nn.Module, allows: Allows = nothing_allowed
) -> Diagnosis:
    """Run the batch of `finding` again and find the operation that made the non-finite value.

    `model` is the watched root, in which the names of the finding are names. `allows` tells which infinities are meant.
    A value that was in a weight is only described. For one that was in a buffer or the data, the operation that spreads
    it is found. Raises nothing of its own: what could not be done is a remark.
    """
    try:
        called, reason = find_called(model, finding.module), no_second_run(snapshot.module)
        if finding.origin in ("weight", "buffer", "data"):
            is_data = finding.origin == "data"
            there = _of_data(snapshot, finding) if is_data else _of_state(called and called.module, finding)
            if reason or finding.origin == "weight":
                return there
            # The model itself may fill what it was given, as it does a key-value cache, and then does so again.
            if "][" in finding.label and called is not None:
                producer = replace(finding, origin="produced")
                made = _of_forward(snapshot, producer, called.module, model, allows)
                if (step := made.step) is not None and step.call is not None and not step.strangers:
                    return replace(made, call=step.call, made_in=step.call.name)
            return _with_spread(there, snapshot)
        if reason:
            return Diagnosis(remarks=(f"no re-run was made: {reason}",))
        if finding.phase in ("backward", "step"):
            return _of_backward(snapshot, finding, model, allows)
        if called is None:
            return Diagnosis(remarks=(f"the model has no module {finding.module!r} any more",))
        return _of_forward(snapshot, finding, called.module, model, allows)
    except Exception as error:
        return Diagnosis(remarks=(f"the finding could not be examined: {spell(error)}",))


# A value that was there before.


def _of_tensor(x: Tensor, **facts: Any) -> Diagnosis:
    health = observe(x, "", "output").health
    index = None if health is None else health.first_nonfinite
    return Diagnosis(**{"extent": describe(x), "index": index, **facts})


def _of_state(module: nn.Module | None, finding: Finding) -> Diagnosis:
    state = () if module is None else _tensors_of(module)
    return next((_of_tensor(x) for _, label, x in state if label == finding.label), Diagnosis())


def _of_data(snapshot: BatchSnapshot, finding: Finding) -> Diagnosis:
    arguments = named_arguments(snapshot.module, snapshot.args, snapshot.kwargs)
    bad = [pair for label, pair in arguments.items() if observe(pair[1], label, "input").is_fault]
    remarks = tuple(": ".join(filter(None, (came_in(name, x), describe(x)))) for name, x in bad)
    _, x = arguments.get(finding.label, ("", None))
    return Diagnosis(remarks=remarks) if x is None else _of_tensor(x, remarks=remarks)


def _with_spread(diagnosis: Diagnosis, snapshot: BatchSnapshot) -> Diagnosis:
    """Return the diagnosis of a value that was there before, with the operation that makes the most of it.

    It is the first to turn inf into nan, else the first product, which should have masked it, else the first operation
    that passed it on.
    """
    provenance = run(replace(snapshot, grad=False), {}, follows=True).provenance
    steps = [] if provenance is None else [step for step in provenance.steps if step.place is not None]
    turned = [x for x in steps if "nan" in x.values and all("nan" not in values_of(y) for y in x.operands)]
    products = [step for step in steps if step.operation.startswith("aten.mul.")]
    return replace(diagnosis, step=next(iter([*turned, *products, *steps]), None))


# A value that the re-run makes again.


def _of_forward(
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
            return _diagnosis(finding, names, experiment)
        if experiment.error is None:
            break
    remarks, doubts = list[str](), snapshot.doubts()
    if (error := experiment.error) is not None:
        remarks.append(f"the re-run of the batch ended: it raised {spell(error)}")
    else:
        if all(call.name != finding.module for call in experiment.calls):
            remarks.append(f"the re-run did not call {finding.module or 'the root module'}")
        if doubts:
            remarks.append("the re-run of the batch did not make the value again, which says little here")
    remarks += doubts
    return Diagnosis(transient=None if remarks else True, remarks=tuple(remarks))


def _diagnosis(finding: Finding, names: Mapping[nn.Module, str], experiment: Experiment) -> Diagnosis:
    """Return the diagnosis of the tensor that is the fault of the run."""
    assert experiment.fault is not None
    assert experiment.provenance is not None
    (x, call, caller), step, provenance = experiment.fault, experiment.failure, experiment.provenance
    is_producer = finding.origin == "produced"
    guilty = call if is_producer else caller
    if is_producer and finding.label.startswith("input") and step is not None:
        # The re-run began with what the first run wrote there.
        was_there = any(x.data_ptr() == y.data_ptr() for y in step.strangers)
        step = (provenance.last_write(x) if was_there else None) or step
    remarks = [] if provenance.trouble is None else [provenance.trouble]
    made_in, maker = None, None if step is None else step.call
    is_inside = maker is not None and is_producer and is_in(maker.name, finding.module)
    if maker is not None and maker is not guilty and not is_inside:
        guilty, made_in = maker, maker.name
    if step is None:
        remarks.insert(0, "no operation that goes through PyTorch's dispatcher was seen to make the value")
    elif step.meant and x.numel() > 1:  # a single number is a loss, and no mask
        excuse = f"inf:{finding.module or '(root)'}"
        advice = f"if that is meant, as in a mask, watch with allow={excuse!r}"
        remarks.insert(0, f"{step.operation} put {step.spelt} there; {advice}")
    remarks += () if step is None else step.remarks
    remarks += (
        f"the call wrote to its {label}, in place: what it was given is no longer there"
        for label in guilty.written()
        if label != finding.label
    )
    facts: dict[str, Any] = {"step": step, "transient": False, "remarks": tuple(remarks)}
    strangers = () if step is None else step.strangers
    memory = {y.untyped_storage()._cdata for y in strangers if is_plain(y)}
    for module, name in names.items() if memory else ():
        for role, label, y in _tensors_of(module):
            is_held = is_plain(y) and y.untyped_storage()._cdata in memory
            if is_held and (record := observe(y, label, role)).is_fault:
                holder = Frame(finding.batch, name, type(module).__name__, (record,))
                return _of_tensor(y, **{**facts, "transient": None, "holder": holder})
    if any("nan" in values_of(observe(y, "", "input")) for y in strangers):
        facts["transient"] = None  # no change is a cure: it would hide what was there
    return _of_tensor(x, **facts, call=guilty, made_in=made_in)


def _tensors_of(module: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield weights and buffers; of a quantized weight or another subclass the tensors that it is made of."""
    for role, name, tensor in state_of(module):
        for label, x in inner_tensors(tensor, name):
            yield role, label, x


# A gradient.


def _of_backward(snapshot: BatchSnapshot, finding: Finding, model: nn.Module, allows: Allows) -> Diagnosis:
    guilty = finding.module if finding.origin == "produced" else finding.source_module
    taken = [x.grad for x in model.parameters() if x.grad is not None]
    experiment = run(replace(snapshot, grad=True), module_names(model), allows=allows, follows=True)
    # A loss that overflows too is not what made a gradient inside the model.
    step = experiment.failure if guilty is None else experiment.bad_gradient
    if step is None:
        error = experiment.error
        nothing = "in a re-run of the batch no operation made a bad gradient"
        remark = nothing if error is None else f"the backward could not be examined: {spell(error)}"
        return Diagnosis(remarks=(remark, *snapshot.doubts()))
    if finding.phase == "step":
        x, y = (nn.utils.parameters_to_vector(tensors).abs() for tensors in (taken, experiment.results))
        if len(x) != len(y) or torch.isclose(x, y, equal_nan=True)[~x.isfinite()].float().mean() < 0.5:
            return Diagnosis(remarks=("the gradients of the latest backward alone fail in another way",))
    if guilty is None and step.module is not None and not step.in_backward:
        # The loss read this auxiliary loss from an attribute, and the module has no bad gradient yet.
        remark = f"it was made in the forward of {f'`{step.module}`' if step.module else 'the model'}"
        return Diagnosis(step, remarks=(*step.remarks, remark))
    is_inside = step.module is None or (guilty is not None and is_in(step.module, guilty))
    return Diagnosis(step, remarks=step.remarks, made_in=None if is_inside else step.module)


# Where in a tensor its bad elements are

# Beyond this a bool for every element asks too much of a device that is full.
_MAX_ELEMENTS = 1 << 31


def describe(x: Tensor) -> str:
    """Return where the nan and inf of `x` are; "" when it cannot be told.

    One of "none", "all", "one element", "1 of 4096 rows, row 7" or "7 of 4096 rows" (whole rows: all positions of the
    last dimension), "column 5" or "3 of 8 columns" (whole columns of a matrix), "scattered over 5 of 4096 rows" (parts
    of 5 rows), "scattered". Reads any dtype and strides; of a DTensor the local shard. Returns "" for tensors of more
    than 2**31 elements, without values, and of other layouts than strided.
    """
    with only_our_dispatch(), torch.no_grad():
        shard = local_shard(x)
        x = x if shard is None else shard
        if unreadable(x) or not is_plain(x) or x.numel() > _MAX_ELEMENTS:
            return ""
        bad = ~torch.isfinite(_reference._to_arithmetic(x.detach()))
        count = int(bad.sum())
        if count in (0, bad.numel()):
            return "all" if count else "none"
        if count == 1 or bad.ndim < 2:
            return "one element" if count == 1 else "scattered"
        rows, num_columns = bad.any(dim=-1).flatten().nonzero().flatten().tolist(), bad.shape[-1]
        num_rows = bad.numel() // num_columns
        if count == len(rows) * num_columns:
            which = f", row {rows[0]}" if len(rows) == 1 and bad.ndim == 2 else ""
            return f"{len(rows)} of {num_rows} rows{which}"
        columns = bad.any(dim=0).nonzero().flatten().tolist() if bad.ndim == 2 else []
        if columns and count == len(columns) * num_rows:
            return f"column {columns[0]}" if len(columns) == 1 else f"{len(columns)} of {num_columns} columns"
        return f"scattered over {len(rows)} of {num_rows} rows" if len(rows) < num_rows else "scattered"
