"""Search for the operation that made a non-finite value: one re-run of the batch, forward and backward.

ProvenanceMode reads each operation of the run. The search looks at the tensor that the finding speaks of, an output or
an input of a module or a gradient, and asks which operation began its values. `BatchSnapshot.again` puts back what the
run has changed, and no gradient of the user's is touched.

The loss is no part of the model, so the gradients that a module's outputs had in the failed backward are gone.
Gradients of the size that was seen stand in for them: an operation whose derivative is not finite shows with any, an
overflow with those as large as the largest, and one in a weight's gradient with the signs that add up there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..instrumentation.execution_context import Autocast, RngState
from ..instrumentation.functions import find_called
from ..instrumentation.slot import wrap_calls
from ..instrumentation.wrapped_names import is_recorded, named_modules
from ..numerics.readable import inner_tensors, is_plain
from ..recording.observe import observe, state_of
from ..recording.walk import Leaf, call_leaves, leaves
from ..records.record import Frame, Record
from ..report.finding import Finding, value_of
from ..util.modules import is_in
from ..util.visible import spell, suppressed
from .batch_snapshot import BatchSnapshot, left_calls, no_second_run
from .causes import came_in, named_arguments
from .diagnosis import BackwardStart, Diagnosis, ModuleCall, Step, describe
from .experiment import mean_gradients, run_backward, with_graph, with_leaves, without_hooks
from .isolation import RerunEndedError
from .provenance import ProvenanceMode

_OF_CALL = "the operation was found in a re-run of the call, from other gradients of the same size"
_OF_BATCH = "the operation was found in a re-run of the batch, with the mean of its outputs as the loss"
_NO_GRADIENT = "no gradient of its outputs was seen, so there was none to start a second backward from"
_NOTHING = "in a re-run, with other gradients of the same size, no operation made a bad gradient"
_KEPT_ELSEWHERE = (
    "the value is in no output of the module, and no gradient of its outputs brings it back: what computed the loss may"
    " have read it from elsewhere, as from an attribute"
)
_LEFT_OUT = (
    "in the forward {} made a bad value that is left out of the result, as by `torch.where` or by a product with 0; its"
    " gradient in {} is 0 times that, which is nan"
)


def find_operation(
    snapshot: BatchSnapshot, finding: Finding, *, model: nn.Module, frames: Sequence[Frame] = ()
) -> Diagnosis:
    """Run the batch of `finding` again and find the operation that made the non-finite value.

    `model` is the watched root, in which the names of the finding are names. `frames` are those of the report: they
    have the sizes of gradients. A value that was in a weight is only described. For one that was in a buffer or the
    data, the operation that spreads it is found. Raises nothing of its own: what could not be done is a remark.
    """
    try:
        if finding.phase == "backward":
            return _of_backward(snapshot, finding, model, frames)
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
    provenance = ProvenanceMode(_with_spread.__code__)
    with suppress(Exception), snapshot.again() as call, provenance:
        call()
    steps = [step for step in provenance.steps if step.place is not None]
    turned = [step for step in steps if step.turned]
    products = [step for step in steps if step.operation.startswith("aten.mul.")]
    return replace(diagnosis, step=next(iter([*turned, *products, *steps]), None))


# A value that the re-run makes again.


class _Search:
    """A re-run of a batch whose operations are read, up to where the value of the finding shows.

    The suspect is the module of the finding, or the one that made its gradient.
    """

    def __init__(self, finding: Finding, suspect: nn.Module, model: nn.Module) -> None:
        self.finding = finding
        self.suspect = suspect
        self.diagnosis: Diagnosis | None = None
        self.names = {named.module: named.name for named in named_modules(model) if is_recorded(named.module)}
        # The calls under way, of the thread that makes the re-run.
        self.open_calls: list[ModuleCall] = []
        self.provenance = ProvenanceMode(_Search.run.__code__, self.open_calls)

    def run(self, snapshot: BatchSnapshot) -> None:
        """Make the outermost call of the batch again, and examine the calls in it."""
        wrapped = wrap_calls([*self.names, self.suspect], self.call)
        try:
            with snapshot.again() as call, torch.set_grad_enabled(snapshot.grad), wrapped, self.provenance:
                self.finish(call())
        finally:
            self.provenance.active = False

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of a module, and look at what the finding speaks of."""
        raise NotImplementedError

    def finish(self, output: Any) -> None:
        """Take what the batch has returned."""

    def make(self, call: ModuleCall) -> Any:
        """Make the call, which is under way meanwhile."""
        self.open_calls.append(call)
        try:
            return call.module._call_impl(*call.args, **call.kwargs)
        finally:
            self.open_calls.pop()


def _of_forward(snapshot: BatchSnapshot, finding: Finding, suspect: nn.Module, model: nn.Module) -> Diagnosis:
    # Without a graph it needs less memory. Where that raises, the forward may ask for one, as for a tensor's hook.
    for grad in (False, True) if snapshot.grad else (False,):
        search, failure = _ForwardSearch(finding, suspect, model, snapshot), ""
        try:
            search.run(replace(snapshot, grad=grad))
        except RerunEndedError as error:
            failure = str(error)
        except Exception as error:
            failure = f"it raised {spell(error)}"
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


class _ForwardSearch(_Search):
    """Search for the origin of an output or an input of the suspect."""

    def __init__(
        self, finding: Finding, suspect: nn.Module, model: nn.Module, snapshot: BatchSnapshot
    ) -> None:
        super().__init__(finding, suspect, model)
        self.was_called = False
        self.trouble: list[str] = []
        self._is_producer = finding.origin == "produced"
        self._is_output = self._is_producer and not finding.label.startswith("input")
        # Versions of the tensors that the batch was called with, by id.
        self._versions = {id(x): version for x, version in snapshot.versions}

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of a module, and look at the output or the input of the finding."""
        if self.diagnosis is not None:
            return module._call_impl(*args, **kwargs)
        given = [(label, x) for label, x in call_leaves(args, kwargs) if isinstance(x, Tensor)]
        versions = tuple(
            (label, x, self._versions.get(id(x), x._version)) for label, x in given if not x.is_inference()
        )
        name = self.names.get(module, self.finding.module)
        call = ModuleCall(name, module, args, kwargs, RngState.capture(), Autocast.capture(), versions)
        is_suspect = module is self.suspect
        # A receiver that nobody called was called by the batch.
        guilty = call if self._is_producer or not self.open_calls else self.open_calls[-1]
        self.was_called = self.was_called or is_suspect
        if is_suspect and not self._is_producer:
            self._look(call_leaves(args, kwargs), guilty)
        try:
            result = self.make(call)
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


def _of_backward(
    snapshot: BatchSnapshot, finding: Finding, model: nn.Module, frames: Sequence[Frame]
) -> Diagnosis:
    name = finding.module if finding.origin == "produced" else finding.source_module
    if name is None:
        remark = "what made it lies behind the model's outputs, so it was not looked for in the model"
        return Diagnosis(remarks=(remark,))
    if reason := no_second_run(snapshot.module):
        return Diagnosis(remarks=(f"no re-run was made: {reason}",))
    suspect = find_called(model, name)
    if suspect is None:
        return Diagnosis(remarks=(f"the model has no module {name!r} any more",))
    search = _BackwardSearch(finding, suspect.module, model, name, frames)
    again, search.leaves = with_leaves(snapshot)
    remark = _NOTHING if search.sizes else _NO_GRADIENT
    try:
        with suppress(_OperationFound):
            search.run(replace(again, grad=True))
    except Exception as error:
        remark = f"the backward could not be examined: {spell(error)}"
    if search.diagnosis is not None:
        return search.diagnosis
    for step in search.provenance.steps if search.sizes else ():
        began = step.origin is None and step.place is not None and not (step.meant or step.unwritten)
        if began and step.module is not None and is_in(step.module, name):
            return Diagnosis(step, remarks=(_KEPT_ELSEWHERE, *step.remarks), is_unseen=True)
    return Diagnosis(remarks=(remark, *snapshot.doubts()))


class _OperationFound(Exception):  # noqa: N818 - ends the run, and is no error
    """Ends a run: the operation is found."""


class _BackwardSearch(_Search):
    """Search for the origin of a bad gradient: in the backwards of the suspect's calls, then in one of the batch.

    The backward of the batch finds what those of the calls do not: a gradient that is a sum over several calls, and a
    forward that itself asks for gradients.
    """

    def __init__(
        self, finding: Finding, suspect: nn.Module, model: nn.Module, name: str, frames: Sequence[Frame]
    ) -> None:
        super().__init__(finding, suspect, model)
        self.leaves: list[Tensor] = []
        # The sizes of gradients to try, the smaller first, for the labels of the suspect's outputs.
        self.sizes: dict[str, list[float]] = {}
        for frame in frames:
            if (frame.name, frame.batch, frame.phase) == (name, finding.batch, "backward"):
                self.sizes.update(_sizes(frame))
        self._name = name
        self._has_frames = bool(frames)
        self._number = -1
        self._is_in_backward = False

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of a module, and the backward of the suspect's."""
        call = ModuleCall(self.names.get(module, self._name), module, args, kwargs)
        if module is not self.suspect or self._is_in_backward:
            return self.make(call)
        self._number += 1
        tensors = [x for _, x in call_leaves(args, kwargs) if isinstance(x, Tensor) and x.requires_grad]
        given = [get_gradient_edge(x) for x in tensors]  # a call may write to them
        output = self.make(call)
        wanted = [*given, *(x for x in module.parameters() if x.requires_grad)]
        outputs = {label: x for label, x in with_graph(output) if label in self.sizes}
        if outputs and wanted:
            weight = module._parameters.get(self.finding.label.removesuffix(".grad"))
            self._try_gradients(outputs, wanted, weight)
        return output

    def _try_gradients(self, outputs: dict[str, Tensor], wanted: list[Any], weight: Tensor | None) -> None:
        """Make backwards of a call. Raises _OperationFound where one has made a bad gradient."""
        roots, sizes = list(outputs.values()), [self.sizes[label] for label in outputs]
        for gradients, large in _stand_ins(roots, sizes, weight, self.finding.index):
            self._backward(roots, wanted, gradients, _OF_CALL)
            if self.diagnosis is not None:
                given = {label: x.detach() for label, x in zip(outputs, large, strict=True)}
                start = BackwardStart(self._name, self._number, given)
                self.diagnosis = replace(self.diagnosis, start=start)
                raise _OperationFound

    def finish(self, output: Any) -> None:
        """Make a backward of the whole batch, with the mean of its outputs as the loss."""
        ends = [x for _, x in with_graph(output)]
        if ends and self.leaves:
            self._backward(ends, self.leaves, mean_gradients(ends), _OF_BATCH)

    def _backward(self, roots: list[Tensor], wanted: list[Any], gradients: list[Tensor], how: str) -> None:
        self._is_in_backward = True  # a checkpoint calls modules in it
        try:
            run_backward(roots, wanted, gradients, partial(self._look, how))
        finally:
            self._is_in_backward = False

    def _look(self, how: str, node: Any, x: Tensor, record: Record) -> None:
        """Settle the first bad gradient that a node of the graph has made."""
        if self.diagnosis is not None or not record.is_fault:
            return
        value = value_of(record)
        left_out: tuple[str, ...] = ()
        step = self.provenance.origin(x, nan="nan" in value)
        if step is None or step.meant:
            place, module = self.provenance.site_of(node)
            is_nan, is_negative = "nan" in value, value == "-inf"
            step = Step(0, node.name(), nan=is_nan, neginf=is_negative, place=place, module=module)
        elif not step.in_backward:
            left_out = (_LEFT_OUT.format(step.operation, node.name()),)
        # The statements of a loss, which have no frames, call modules that did not make the finding's record.
        is_inside = step.module is None or (self._has_frames and is_in(step.module, self._name))
        made_in = None if is_inside or how == _OF_CALL else step.module
        self.diagnosis = Diagnosis(step, remarks=(how, *step.remarks, *left_out), made_in=made_in)


def _sizes(frame: Frame) -> Iterator[tuple[str, list[float]]]:
    """Yield for the outputs of a call the sizes that their gradients had."""
    for record in frame.records:
        label = record.label.removesuffix(".grad")
        # All zeros stand for themselves: zero times a pole is nan.
        if label.startswith("output") and record.isfinite and record.abs_max is not None:
            yield label, [record.abs_min or record.abs_max / 1024, record.abs_max]


def _stand_ins(
    roots: list[Tensor], sizes: list[list[float]], weight: Tensor | None, index: tuple[int, ...] | None
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield gradients to try, of equal elements first, and those of the largest size for each.

    A weight's gradient is a sum over the batch: of products with both signs equal gradients leave little.
    """
    small, large = (
        [torch.full_like(x, size[place]) for x, size in zip(roots, sizes, strict=True)] for place in (0, 1)
    )
    yield small, large
    yield large, large
    if weight is not None and weight.requires_grad and (signs := _signs(roots, weight, index)):
        signed = [sign * x for sign, x in zip(signs, large, strict=True)]
        yield signed, signed


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
