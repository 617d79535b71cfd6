"""A loss outside all modules that made the value: its operation from autograd's graph, its line from a second run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ..recording.observe import observe
from ..report.finding import Finding, value_of
from ..report.record import is_fault, to_record
from ..util.visible import spell
from .backward_rerun import place_of, rerun_backward
from .batch_snapshot import BatchSnapshot, Forwards, is_narrow, num_processes
from .diagnosis import Diagnosis, enrich
from .experiment import Allows, Conditions, graph_nodes, nothing_allowed
from .forward_rerun import rerun_forward
from .loss_statements import BackwardCall, LossStatements, Refused
from .patching.patches import MOST_RUNS, try_patches
from .patching.rules import DERIVATIVE_POLES, POLES, operation_name

# More are no hint.
_MOST_NODES = 6
_ADVICE = 'put the loss into a function below `@nanwatch.watched("loss")`: a report then has its line and its operands'


def read_graph(finding: Finding, call: BackwardCall) -> Finding:
    """Return the finding with what the graph of the backward under way tells of the loss.

    The gradient came to the model non-finite. The values that the nodes of the loss saved are gone. Only their names
    tell which can have made it, and in anomaly mode the line.
    """
    nodes = sorted(
        graph_nodes((x.grad_fn for x in call.roots), call.since), key=lambda node: int(node._sequence_nr())
    )
    is_finite = _value(call) is None
    names = DERIVATIVE_POLES if is_finite else POLES | DERIVATIVE_POLES
    poles = [node for node in nodes if operation_name(node.name()) in names and not _is_whole_power(node)]
    if not nodes:
        return finding
    places = {node: place_of(node.metadata.get("traceback_", ())) for node in poles or nodes}
    spelt = [node.name() + (f" at {place}" if place else "") for node, place in places.items()]
    remark = (
        f"the loss was {'finite' if is_finite else 'not finite'}; of what lies between the model and the loss, the"
        f" value can come from {' or '.join(list(dict.fromkeys(spelt))[:_MOST_NODES])}"
    )
    # A gradient may overflow in any operation on half precision, and where it is converted to it.
    is_half = any(is_narrow(str(x.dtype)) for x in call.roots) or any(
        node.name() == "ToCopyBackward0" for node in nodes
    )
    is_known = len(poles) == 1 and not is_half
    place = places[poles[0]] if is_known else None
    call.remark = remark
    return replace(
        finding,
        operation=poles[0].name() if is_known else None,
        source=str(place) if place else None,
        remarks=(*finding.remarks, remark),
    )


def _value(call: BackwardCall) -> Any:
    """Return which non-finite values the tensors hold that the backward began at; None for finite ones."""
    rows = [observe(x.detach(), "output", "output") for x in call.roots]
    return next((value_of(to_record(row)) for row in rows if is_fault(row)), None)


def _is_whole_power(node: Any) -> bool:
    """Return whether the node is that of a power without a pole, as of a square."""
    exponent = getattr(node, "_saved_exponent", None) if node.name().startswith("PowBackward0") else None
    return isinstance(exponent, int | float) and exponent >= 1


def rerun_loss(call: BackwardCall, finding: Finding, model: nn.Module, conditions: Conditions) -> Finding:
    """Return the finding with the operation, line and cures that a second run of the loss's statements shows.

    Raises nothing of its own: what could not be done is a remark.
    """
    found = _rerun(call, finding, model, conditions)
    if found.operation is not None:
        # The operations that the graph made likely.
        finding = replace(finding, remarks=tuple(x for x in finding.remarks if x != call.remark))
    return enrich(finding, found)


def _rerun(call: BackwardCall, finding: Finding, model: nn.Module, conditions: Conditions) -> Diagnosis:
    try:
        if num_processes() > 1:
            raise Refused("other ranks would have to run it along")
        statements = call.statements(model)
        found = _examined(statements, call, finding, conditions)
    except Refused as reason:
        return Diagnosis(remarks=(f"the loss was not computed again: {reason}; {_ADVICE}",))
    except Exception as error:
        return Diagnosis(remarks=(f"the loss could not be computed again: {spell(error)}; {_ADVICE}",))
    first, last = statements.lines
    lines = f"line {first}" if first == last else f"lines {first} to {last}"
    where = f"{lines} of {statements.filename}"
    if found.operation is None:
        why = "; ".join(found.remarks) or "the value did not come back"
        return Diagnosis(remarks=(f"the loss was computed again by {where}: {why}; {_ADVICE}",))
    return replace(found, remarks=(f"found by running {where} again",))


def _examined(
    statements: LossStatements, call: BackwardCall, finding: Finding, conditions: Conditions
) -> Diagnosis:
    snapshot = BatchSnapshot(
        statements,
        (),
        statements.inputs,
        call.rng,
        call.autocast,
        inference=False,
        grad=True,
        forwards=Forwards(),
    )
    # Of a call of this module, that returns the loss.
    own = replace(
        finding, module="", label="output", origin="produced", source_module=None, operation=None, source=None
    )
    conditions = conditions._replace(allows=_below(conditions.allows))
    if (value := _value(call)) is None:
        found = rerun_backward(
            snapshot, own, (), model=statements, conditions=conditions, at=statements.target
        )
        return replace(found, start=None)
    own = replace(own, phase="forward", value=value)
    found = rerun_forward(snapshot, own, model=statements)
    if found.operation is None:
        return found
    tried = try_patches(
        snapshot,
        enrich(own, found),
        statements,
        found.place,
        most_runs=MOST_RUNS,
        conditions=conditions,
        may_hide=True,
        at=statements.target,
    )
    # The call is no module of the user's, from which a capsule could be made.
    return replace(found, cures=tuple(tried.cures), call=None, rows=(), extent="", index=None)


def _below(allows: Allows) -> Allows:
    """Return the same for the names of the model's modules below the statements."""

    def allowed(name: str, module: nn.Module) -> Any:
        inner = name.removeprefix("model").removeprefix(".")
        return allows(inner, module) if name.startswith("model") else nothing_allowed(name, module)

    return allowed
