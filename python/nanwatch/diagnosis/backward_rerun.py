"""The call whose backward made a non-finite gradient once more, each operation of its backward looked at.

The loss is no part of the model, so the gradients of the call's outputs are not there a second time. Gradients of the
size that was seen stand in for them: an operation whose derivative is not finite shows with any, an overflow with those
as large as the largest, and one in a weight's gradient with the signs that add up there. The same backward from smaller
ones shows whether a smaller loss scale would have been enough.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_map_only

from ..instrumentation.functions import find_called
from ..instrumentation.slot import wrap_calls
from ..instrumentation.wrapped_names import module_names
from ..recording.observe import observe
from ..records.record import Frame
from ..report.finding import Finding, value_of
from ..util.modules import is_in
from ..util.program_code import SKIPPED_FILES
from ..util.visible import spell, suppressed
from .batch_snapshot import BatchSnapshot, is_narrow, no_second_run
from .diagnosis import BackwardStart, Diagnosis, Expression
from .experiment import (
    fresh_leaves,
    gradient_record,
    graph_nodes,
    mean_gradients,
    run_backward,
    with_graph,
    with_leaves,
    without_hooks,
)
from .patching.table import DERIVATIVE_POLES, POLES, operation_name
from .provenance import ProvenanceMode, Step

if TYPE_CHECKING:
    from .loss_statements import BackwardCall

_LINE = re.compile(r'File "(.+)", line (\d+)')

# More are no hint.
_MOST_NODES = 6
_KEPT_ELSEWHERE = (
    "the value is in no output of the module, and no gradient of its outputs brings it back: what computed the loss may"
    " have read it from elsewhere, as from an attribute"
)
_INSIDE = "the operation is in the Python backward of {}, whose forward was called at {}"
_LEFT_OUT = (
    "in the forward {} made a bad value that is left out of the result, as by `torch.where` or by a product with 0; its"
    " gradient in {} is 0 times that, which is nan"
)


class _OperationFound(Exception):  # noqa: N818 - ends the run, and is no error
    """Ends a run: the operation is found."""


def rerun_backward(
    snapshot: BatchSnapshot, finding: Finding, frames: Sequence[Frame], *, model: nn.Module
) -> Diagnosis:
    """Find the operation that makes a non-finite gradient of finite ones, in a re-run of the batch of `finding`.

    The re-run makes the backward of the guilty module's calls. `frames` are the report's. No gradient of the user's is
    touched. Raises nothing of its own: what could not be done is a remark.
    """
    name = finding.module if finding.origin == "produced" else finding.source_module
    if name is None:
        return Diagnosis(
            remarks=("what made it lies behind the model's outputs, so it was not looked for in the model",)
        )
    if reason := no_second_run(snapshot.module):
        return Diagnosis(remarks=(f"no re-run was made: {reason}",))
    remarks, probe = list[str](), None
    try:
        guilty = find_called(model, name)
        if guilty is None:
            return Diagnosis(remarks=(f"the model has no module {name!r} any more",))
        if magnitudes := _magnitudes(finding, frames, name):
            probe = _BackwardProbe(finding, magnitudes)
            with snapshot.again() as call, wrap_calls([guilty.module], probe.run), suppress(_OperationFound):
                call()
            if probe.gradients:
                return replace(probe.diagnosis, start=BackwardStart(name, probe.call, probe.gradients))
        else:
            remarks.append(
                "no gradient of its outputs was seen, so there was none to start a second backward from"
            )
    except Exception as error:
        remarks.append(f"the backward could not be examined: {spell(error)}")
    try:
        if diagnosis := _from_outputs(snapshot, module_names(model)):
            # The statements of a loss, which have no frames, call modules that did not make the finding's record.
            made_in = diagnosis.made_in
            is_inside = made_in is None or (bool(frames) and is_in(made_in, name))
            return replace(diagnosis, made_in=None) if is_inside else diagnosis
        if probe is not None and (step := probe.provenance.first()) is not None:
            return _of_forward(step, _KEPT_ELSEWHERE, is_unseen=True)
    except Exception as error:
        remarks.append(f"the backward could not be examined: {spell(error)}")
    if not remarks:
        remarks.append("in a re-run, with other gradients of the same size, no operation made a bad gradient")
    return Diagnosis(remarks=(*remarks, *(snapshot.doubts() if probe is not None else ())))


def read_graph(finding: Finding, call: BackwardCall) -> Finding:
    """Return the finding with what the graph of the backward under way tells of the loss.

    The gradient came to the model non-finite. The values that the nodes of the loss saved are gone. Only their names
    tell which can have made it, and in anomaly mode the line.
    """
    behind = filter(call.is_behind, graph_nodes((x.grad_fn for x in call.roots), call.since))
    nodes = sorted(behind, key=lambda node: int(node._sequence_nr()))
    is_finite = loss_value(call) is None
    names = DERIVATIVE_POLES if is_finite else POLES | DERIVATIVE_POLES
    poles = [node for node in nodes if operation_name(node.name()) in names and not _is_whole_power(node)]
    if not nodes:
        return finding
    places = {node: _place(node) for node in poles or nodes}
    spelt = [node.name() + (f" at {place}" if place else "") for node, place in places.items()]
    remark = (
        f"the loss was {'finite' if is_finite else 'not finite'}; of what lies between the model and the loss, the"
        f" value can come from {' or '.join(list(dict.fromkeys(spelt))[:_MOST_NODES])}"
    )
    # A gradient may overflow in any operation on half precision, and where it is converted to it.
    is_half = any(is_narrow(str(x.dtype)) for x in call.roots) or any(
        node.name() == "ToCopyBackward0" for node in nodes
    )
    call.remark = remark
    is_known = len(poles) == 1 and not is_half
    place = places[poles[0]] if is_known else None
    return replace(
        finding,
        operation=poles[0].name() if is_known else None,
        place=place.at if place else None,
        remarks=(*finding.remarks, remark),
    )


def loss_value(call: BackwardCall) -> Any:
    """Return which non-finite values the tensors hold that the backward began at; None for finite ones."""
    records = [observe(x.detach(), "output", "output") for x in call.roots]
    return next((value_of(record) for record in records if record.is_fault), None)


def _is_whole_power(node: Any) -> bool:
    """Return whether the node is that of a power without a pole, as of a square."""
    exponent = getattr(node, "_saved_exponent", None) if node.name().startswith("PowBackward0") else None
    return isinstance(exponent, int | float) and exponent >= 1


def _from_outputs(snapshot: BatchSnapshot, names: Mapping[nn.Module, str]) -> Diagnosis | None:
    """Make a backward of the whole batch, with the mean of its outputs as the loss; None without a bad gradient.

    It finds what a backward of the guilty call alone does not: a gradient that is a sum over several calls, and a
    forward that itself asks for gradients. `made_in` is the innermost call that made the operation.
    """
    steps: list[Diagnosis] = []
    calls: list[_CallNodes] = []

    def count_nodes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begin = torch._C._autograd._get_sequence_nr()
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            calls.append((begin, torch._C._autograd._get_sequence_nr(), names[module]))

    again, wanted = with_leaves(snapshot)
    provenance = ProvenanceMode(_from_outputs.__code__)
    with again.again() as call, wrap_calls(list(names), count_nodes), torch.enable_grad():
        with torch.autograd.set_detect_anomaly(True, check_nan=False), provenance:
            ends = [x for _, x in with_graph(call())]
        if ends and wanted:
            steps = _first_in_backward(ends, wanted, mean_gradients(ends), provenance, calls)
    remark = "the operation was found in a re-run of the batch, with the mean of its outputs as the loss"
    return replace(steps[0], remarks=(remark, *steps[0].remarks[1:])) if steps else None


def _magnitudes(finding: Finding, frames: Sequence[Frame], name: str) -> dict[str, list[float]]:
    """Return for the labels of the guilty call's outputs the sizes of gradients to try, the smaller first."""
    magnitudes: dict[str, list[float]] = {}
    for frame in frames:
        if (frame.name, frame.batch, frame.phase) != (name, finding.batch, "backward"):
            continue
        for record in frame.records:
            label = record.label.removesuffix(".grad")
            # All zeros stand for themselves: zero times a pole is nan.
            if label.startswith("output") and record.isfinite and record.abs_max is not None:
                magnitudes[label] = [record.abs_min or record.abs_max / 1024, record.abs_max]
    return magnitudes


class _BackwardProbe:
    """Makes the calls of the guilty module, and the backward of each."""

    def __init__(self, finding: Finding, magnitudes: dict[str, list[float]]) -> None:
        self.diagnosis = Diagnosis()
        # The call whose backward failed, counted from 0, and the gradients of its outputs that are tried.
        self.call = -1
        self.gradients: dict[str, Tensor] = {}
        self._label, self._index = finding.label.removesuffix(".grad"), finding.index
        self._magnitudes = magnitudes
        self.provenance = ProvenanceMode(_BackwardProbe.run.__code__, keeps_steps=True)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one call, and its backward."""
        self.call += 1
        with torch.enable_grad():
            (args, kwargs), given = fresh_leaves((args, kwargs), torch.is_floating_point)
            with torch.autograd.set_detect_anomaly(True, check_nan=False), self.provenance:
                output = module._call_impl(*args, **kwargs)
            wanted = [*given, *(x for x in module.parameters() if x.requires_grad)]
            outputs = dict(with_graph(output))
            if outputs and wanted:
                self._backward(outputs, wanted, module._parameters.get(self._label))
        return tree_map_only(Tensor, torch.detach, output)

    def _backward(self, outputs: dict[str, Tensor], wanted: list[Tensor], weight: Tensor | None) -> None:
        sizes = {label: seen for label, seen in self._magnitudes.items() if label in outputs}
        if not sizes:
            return
        roots = [outputs[label] for label in sizes]
        small = [torch.full_like(x, size[0]) for x, size in zip(roots, sizes.values(), strict=True)]
        gradients = [torch.full_like(x, size[1]) for x, size in zip(roots, sizes.values(), strict=True)]
        is_found = self._look(roots, wanted, small) or self._look(roots, wanted, gradients)
        # A weight's gradient is a sum over the batch: of products with both signs equal gradients leave little.
        signs = (
            []
            if is_found or weight is None or not weight.requires_grad
            else _signs(roots, weight, self._index)
        )
        if signs:
            gradients = [sign * size[1] for sign, size in zip(signs, sizes.values(), strict=True)]
            is_found = self._look(roots, wanted, gradients)
        if is_found:
            self.gradients = {label: x.detach() for label, x in zip(sizes, gradients, strict=True)}
            raise _OperationFound

    def _look(self, roots: list[Tensor], wanted: list[Tensor], gradients: list[Tensor]) -> bool:
        """Make a backward, and keep the first operation that was found. Return whether there was one."""
        steps = _first_in_backward(roots, wanted, gradients, self.provenance)
        if steps and self.diagnosis.operation is None:
            self.diagnosis = steps[0]
        return bool(steps)


def _signs(roots: list[Tensor], weight: Tensor, index: tuple[int, ...] | None) -> list[Tensor]:
    """Return for each root ones with the signs that make all its terms of this weight gradient's element positive.

    Empty where that cannot be told, as where an operation has no second derivative.
    """
    ones = [torch.ones_like(x).requires_grad_() for x in roots]
    try:
        with without_hooks([weight]):
            (made,) = torch.autograd.grad(roots, [weight], ones, create_graph=True)
            shares = torch.autograd.grad(made[index or ()].sum(), ones, allow_unused=True)
    except Exception:
        suppressed("the signs of a backward could not be told, as without a second derivative")
        return []
    return [
        torch.ones_like(x) if share is None else torch.where(share < 0, -1.0, 1.0).to(x)
        for x, share in zip(roots, shares, strict=True)
    ]


# Autograd's sequence numbers of a call: of its first node, of the first behind it; and the name of its module.
_CallNodes: TypeAlias = tuple[int, int, str]


def _first_in_backward(
    roots: list[Tensor],
    wanted: list[Tensor],
    gradients: list[Tensor],
    provenance: ProvenanceMode,
    calls: Sequence[_CallNodes] = (),
) -> list[Diagnosis]:
    """Make a backward, and return the first operation that makes a bad gradient of finite ones, if there is one."""
    steps: list[Diagnosis] = []
    inside = ProvenanceMode(_first_in_backward.__code__, fills=True)
    with inside:
        look = partial(_looker, steps=steps, provenance=provenance, inside=inside, calls=calls)
        run_backward(roots, wanted, gradients, look)
    return steps


def _looker(
    node: Any,
    steps: list[Diagnosis],
    provenance: ProvenanceMode,
    inside: ProvenanceMode,
    calls: Sequence[_CallNodes],
) -> Any:
    """Return a hook of a node, which adds a diagnosis to `steps`. `inside` sees the operations of the backward."""

    def look(made: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        if steps:
            return
        results = [gradient_record(x, "") for x in made if x is not None]
        operands = [gradient_record(x, f"gradient[{i}]") for i, x in enumerate(given) if x is not None]
        faults = [record for record in results if record.is_fault]
        if not faults or any(record.isfinite is False for record in operands):
            return
        saved, name = _saved(node), node.name()
        diagnosis = Diagnosis(
            operation=name,
            made="nan" if any("nan" in value_of(record) for record in faults) else "inf",
            place=_place(node),
            operands=(*operands, *(gradient_record(x, label) for label, x in saved)),
            remarks=(
                "the operation was found in a re-run of the call, from other gradients of the same size",
            ),
        )
        if isinstance(node, BackwardCFunction):
            step = _began([x for x in made if x is not None], inside, unwritten=True)
            if step is not None:
                class_name = type(node).__name__.removesuffix("Backward")
                diagnosis = _of_forward(step, _INSIDE.format(class_name, diagnosis.source))
        elif (step := _began([x for _, x in saved], provenance)) is not None:
            # On the same line an operation with a pole of its own says as much.
            is_pole = operation_name(name) in POLES | DERIVATIVE_POLES
            is_same = is_pole and str(step.place) == diagnosis.source
            diagnosis = diagnosis if is_same else _of_forward(step)
            left_out = _LEFT_OUT.format(step.operation, name)
            diagnosis = replace(diagnosis, remarks=(*diagnosis.remarks, left_out))
        number = _forward_node(node)._sequence_nr()
        around = [call for call in calls if call[0] <= number < call[1]]
        made_in = min(around, key=lambda call: call[1] - call[0])[2] if around else None
        steps.append(replace(diagnosis, made_in=made_in))

    return look


def _began(tensors: Sequence[Tensor], provenance: ProvenanceMode, *, unwritten: bool = False) -> Step | None:
    """Return the operation that began the bad values among these; None for infinities that are meant.

    `unwritten`: memory that was not written counts.
    """
    for x in tensors:
        record = gradient_record(x, "")
        step = provenance.origin(x, nan="nan" in value_of(record)) if record.is_fault else None
        if step is not None and step.place is not None and not (step.meant or step.unwritten > unwritten):
            return step
    return None


def _of_forward(step: Step, *remarks: str, is_unseen: bool = False) -> Diagnosis:
    return Diagnosis(
        operation=step.operation,
        made=step.made,
        place=step.place,
        operands=step.operands,
        spreads=step.spreads,
        remarks=(*remarks, *step.remarks),
        is_unseen=is_unseen,
    )


def _saved(node: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors that the forward kept for this operation's backward, with their names."""
    saved = []
    for name in dir(node):
        with suppress(Exception):  # it was freed or never set
            if name.startswith("_saved_") and isinstance(value := getattr(node, name), Tensor):
                saved.append((name.removeprefix("_saved_"), value))
    return saved


def _forward_node(node: Any) -> Any:
    """Return the node whose backward made this one, and so on, up to one that the forward made. Needs anomaly mode."""
    while (parent := node.metadata.get("parent_")) is not None:
        node = parent
    return node


def _place(node: Any) -> Expression | None:
    """Return the line of the forward that led to a node of the graph, as anomaly mode has noted it."""
    for entry in reversed(_forward_node(node).metadata.get("traceback_", ())):
        match = _LINE.search(entry)
        if match and not match[1].startswith(SKIPPED_FILES):
            return Expression(match[1], int(match[2]))
    return None
