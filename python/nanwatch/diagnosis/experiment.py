"""Experiments: the batch run once more under some change, and what every module call and every backward saw.

A backward of a re-run goes through torch.autograd.grad, so that no `.grad` is touched and no hook of the user's runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..instrumentation.slot import wrap_calls
from ..precision.casting import NARROW, autocast_kinds
from ..recording.masks import Excuses, excuses
from ..recording.observe import observe
from ..recording.walk import call_leaves, leaves
from ..records.record import Record
from .batch_snapshot import BatchSnapshot, left_calls
from .operation import Step, values_of
from .provenance import ProvenanceMode

# `allows(name, module)` is True where infinities in this module are meant, or the judge of its values.
Allows = Callable[[str, nn.Module], bool | Excuses]
# Makes a call of a module with the change that is tried.
MakeCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
_LEFT_OUT = (
    "in the forward {} made a bad value that is left out of the result, as by `torch.where` or by a product with 0; its"
    " gradient in {} is 0 times that, which is nan"
)


def nothing_allowed(_: str, module: nn.Module) -> bool | Excuses:
    """Allow no value but masks."""
    return excuses(module)


def make_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call of a module, with nothing changed."""
    return module._call_impl(*args, **kwargs)


class ObservedCall(NamedTuple):
    """One module call: its inputs and outputs, and the narrow format of autocast where it was on."""

    name: str
    records: tuple[Record, ...]
    autocast: torch.dtype | None


@dataclass(slots=True)
class Experiment:
    """A run: its calls in the order in which they ended, what the batch returned, and what its backwards made.

    `error` is the exception that ended it, if one did. `given` are the gradients that its first backward began with.
    Where the run followed its values, `fault` is the first bad tensor of a call, with that call and the call around it,
    `failure` the operation that began the first bad value, and `bad_gradient` that of the first bad gradient.
    """

    provenance: ProvenanceMode | None = None
    calls: list[ObservedCall] = field(default_factory=list)
    error: Exception | None = None
    given: list[Record] = field(default_factory=list)
    gradients: list[Record] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    fault: tuple[Tensor, BatchSnapshot, BatchSnapshot] | None = None
    failure: Step | None = None
    failed_in_backward: bool = False
    bad_gradient: Step | None = None

    def records(self, name: str | None) -> list[Record]:
        """Return the records of all calls of that module."""
        return [record for call in self.calls if call.name == name for record in call.records]

    def bad_labels(self) -> list[str]:
        """Return the label of each value of a call that is non-finite and should not be."""
        return [record.label for call in self.calls for record in call.records if record.is_fault]

    @property
    def has_bad_gradients(self) -> bool:
        """Whether a backward made a gradient that is non-finite."""
        return any(record.is_fault for record in self.gradients)

    def keep_gradients(self, node: Any, made: Sequence[Tensor | None], _: Any) -> None:
        """Keep the gradients that a node of the graph has made, and the operation that began the first bad one."""
        for x in made:
            if x is not None:
                record = observe(x, "gradient", "gradient")
                self.gradients.append(record)
                if record.is_fault and self.bad_gradient is None and self.provenance is not None:
                    self.bad_gradient = self._origin_of(x, record, node, self.provenance)
                    if self.failure is None:
                        self.failure, self.failed_in_backward = self.bad_gradient, True

    def _origin_of(self, x: Tensor, record: Record, node: Any, provenance: ProvenanceMode) -> Step:
        step = provenance.origin(x, record)
        if step is None or step.meant:
            place, module = provenance.site_of(node)
            return Step(0, node.name(), values_of(record), place=place, module=module)
        if not step.in_backward and not any(observe(x, "", "output").is_fault for x in self.results):
            step.remarks += (_LEFT_OUT.format(step.operation, node.name()),)
        return step


def run(
    snapshot: BatchSnapshot,
    names: Mapping[nn.Module, str],
    make: MakeCall = make_call,
    allows: Allows = nothing_allowed,
    *,
    follows: bool = False,
    seeks: Callable[[nn.Module, Record], bool] | None = None,
    squares: bool = False,
    divisor: float = 1.0,
) -> Experiment:
    """Run the batch of `snapshot` once more; keep what its forward raises as the error. KeyboardInterrupt passes.

    make: makes each call of a module.
    follows: whether to find the operation that began the first bad value. Its mode knows the calls under way.
    seeks: whether a bad record of a module is the one whose operation is asked for. The run follows no further values.
    divisor: the gradients that the backward begins with are divided by it.

    A batch with a graph has a backward too, from its outputs, as if their mean were the loss, and with `squares` one as
    if the mean of their squares were. A watch of the model sees nothing of it.
    """
    provenance = ProvenanceMode(run.__code__) if follows else None
    experiment, open_calls = Experiment(provenance), [] if provenance is None else provenance.open_calls
    versions = {id(x): version for x, version in snapshot.versions}

    def keep(call: BatchSnapshot, output: Any, autocast: torch.dtype | None) -> None:
        if open_calls and open_calls[-1] is call:
            open_calls.pop()
        allowed = allows(call.name, call.module)
        values = [
            (x, observe(x, label, "input", allowed)) for label, x in call_leaves(call.args, call.kwargs)
        ]
        values += [(x, observe(x, label, "output", allowed)) for label, x in leaves(output, "output")]
        experiment.calls.append(ObservedCall(call.name, tuple(record for _, record in values), autocast))
        for x, record in values:
            is_sought = (
                record.is_fault and isinstance(x, Tensor) and (not seeks or seeks(call.module, record))
            )
            if is_sought and provenance is not None and provenance.active:
                # A receiver that nobody called was called by the batch.
                experiment.fault = experiment.fault or (x, call, open_calls[-1] if open_calls else call)
                experiment.failure = experiment.failure or provenance.origin(x, record)
                provenance.active = seeks is None

    def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = names.get(module, "" if module is snapshot.module else "?")
        formats = (torch.get_autocast_dtype(x) for x in autocast_kinds() if torch.is_autocast_enabled(x))
        autocast = next((dtype for dtype in formats if dtype in NARROW), None)
        given = [x for _, x in call_leaves(args, kwargs) if isinstance(x, Tensor) and not x.is_inference()]
        before = tuple((x, versions.get(id(x), x._version)) for x in given)
        call = BatchSnapshot(module, args, kwargs, versions=before, name=name)
        if module in names:
            open_calls.append(call)
        try:
            output = make(module, args, kwargs)
        except Exception as error:
            # A hook that looks for bad values itself has left the output.
            left = next((left.output for left in left_calls(error) if left.module is module), ())
            keep(call, left, autocast)
            raise
        keep(call, output, autocast)
        return output

    try:
        again = _with_leaves(snapshot) if snapshot.grad else snapshot
        graph = torch.enable_grad() if snapshot.grad else nullcontext()
        with again.again() as call, graph, provenance or nullcontext():
            with wrap_calls((*names, *snapshot.module.modules()), seen):
                output = call()
            results = [x for _, x in leaves(output, "output") if isinstance(x, Tensor)]
            experiment.results = [x.detach() for x in results]
            if roots := [x for x in results if snapshot.grad and x.requires_grad]:
                given = [torch.full_like(x, 1 / max(x.numel(), 1) / divisor) for x in roots]
                experiment.given = [observe(x, "gradient", "gradient") for x in given]
                run_backward(experiment, roots, given)
                if squares:
                    given = [2 * x.detach() * gradient for x, gradient in zip(roots, given, strict=True)]
                    run_backward(experiment, roots, given)
    except Exception as error:
        # Without its traceback, whose frames hold the activations of the run.
        experiment.error = error.with_traceback(None)
    finally:
        if provenance is not None:
            provenance.active = False
    return experiment


def _with_leaves(snapshot: BatchSnapshot) -> BatchSnapshot:
    """Return the snapshot with new leaves for tensors that require a gradient: the graph behind them is the user's."""
    # A leaf could not be written to.
    fresh = lambda x: x.detach().requires_grad_().clone() if x.requires_grad else x  # noqa: E731
    with torch.enable_grad():
        args, kwargs = _pytree.tree_map_only(Tensor, fresh, (snapshot.args, dict(snapshot.kwargs)))
    return replace(snapshot, args=args, kwargs=kwargs)


def run_backward(experiment: Experiment, roots: list[Tensor], gradients: list[Tensor]) -> None:
    """Run a backward from these gradients of the roots to the leaves of their graph. Keep what each node makes."""
    nodes, left = dict[Any, None](), [x.grad_fn for x in roots]
    while left:
        node = left.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            left += [following for following, _ in node.next_functions]
    # The leaves include weights of a model that a function calls.
    ends = [*(x for x in roots if x.is_leaf), *(node.variable for node in nodes if hasattr(node, "variable"))]
    with ExitStack() as after:
        for node in nodes:
            after.callback(node.register_hook(partial(experiment.keep_gradients, node)).remove)
        for hooks in filter(None, [x._backward_hooks for x in ends]):
            # The user's may add up gradients. The engine holds the dict, so it is emptied and filled again.
            after.callback(hooks.update, dict(hooks))
            hooks.clear()
        for kind in autocast_kinds():  # a backward runs behind the block of the forward's autocast
            after.enter_context(torch.autocast(kind, enabled=False))
        torch.autograd.grad(roots, ends, gradients, retain_graph=True, allow_unused=True)
