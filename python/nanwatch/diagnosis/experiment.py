"""Experiments: the batch run once more under some change, what every module call saw, and whether the change works.

A backward of a re-run goes through torch.autograd.grad, so that no `.grad` is touched and no hook of the user's runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..instrumentation.slot import wrap_calls
from ..instrumentation.wrapped_names import module_names, named_modules
from ..precision.casting import NARROW, autocast_kinds, first_float, replaced
from ..recording.masks import Excuses, excuses
from ..recording.observe import observe
from ..recording.walk import Leaf, call_leaves, leaves
from ..records.record import Record
from ..report.finding import Cure, Finding, value_of
from ..util.visible import suppressed
from .batch_snapshot import BatchSnapshot
from .diagnosis import BackwardStart
from .float64 import LARGEST, MOST_BY_GUARD, Agreement, agreement, loaded, moved, widened
from .operation import tensors_in
from .provenance import ProvenanceMode, Step

# `allows(name, module)` is True where infinities in this module are meant, or the judge of its values.
Allows = Callable[[str, nn.Module], bool | Excuses]


def nothing_allowed(_: str, module: nn.Module) -> bool | Excuses:
    """Allow no value but masks."""
    return excuses(module)


class Conditions(NamedTuple):
    """The conditions of trials: the loss scale where it is known, which infinities are meant, whether gradients are
    watched."""

    loss_scale: float | None = None
    allows: Allows = nothing_allowed
    gradients: bool = False


NO_CONDITIONS = Conditions()


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """One module call: its rows (inputs, outputs), the first floating-point dtype given, autocast's where it was on."""

    name: str
    rows: tuple[Record, ...]
    given: torch.dtype | None
    autocast: torch.dtype | None


@dataclass(slots=True)
class Experiment:
    """The calls of a run in the order in which they ended, and the exception that ended the run, if one did."""

    calls: list[ObservedCall] = field(default_factory=list)
    error: Exception | None = None
    # Gradients that its backwards made.
    gradients: list[Record] = field(default_factory=list)
    # Tensors that the batch returned.
    results: list[Tensor] = field(default_factory=list)
    # The operation that began the first bad value, where the run followed them.
    failure: Step | None = None
    failed_in_backward: bool = False
    provenance: ProvenanceMode | None = None

    def rows(self, name: str, label: str) -> list[Record]:
        """Return the rows of that label in all calls of that module."""
        return [row for call in self.calls if call.name == name for row in call.rows if row.label == label]

    def outputs(self, name: str | None) -> list[Record]:
        """Return the rows of all outputs of that module."""
        return [row for call in self.calls if call.name == name for row in call.rows if row.role == "output"]

    def nonfinite(self) -> Iterator[tuple[str, str]]:
        """Return `(module, label)` of each row that is non-finite and should not be."""
        for call in self.calls:
            yield from ((call.name, row.label) for row in call.rows if row.is_fault)

    @property
    def bad_gradients(self) -> list[Record]:
        """The gradients that were not finite."""
        return [record for record in self.gradients if record.is_fault]

    def keep_gradients(self, _: Any) -> Callable[[Sequence[Tensor | None], Any], None]:
        """Return a hook of a node of the graph, which keeps the gradients that the node makes."""

        def look(made: Sequence[Tensor | None], _: Any) -> None:
            for x in made:
                if x is not None:
                    record = gradient_record(x, "gradient")
                    self.gradients.append(record)
                    if record.is_fault:
                        self.failed_in_backward |= self.failure is None
                        self.note_origin(x, record)

        return look

    def note_origin(self, x: Tensor, record: Record) -> None:
        """Note the operation that began the values of a bad tensor, the first for which one is known."""
        if self.provenance is not None and self.failure is None:
            self.failure = self.provenance.origin(x, nan="nan" in value_of(record))


@dataclass(frozen=True, slots=True)
class Change:
    """The change that an experiment makes at the module calls themselves.

    `autocast`: the dtype that takes the place of float16 in autocast. `clamp` is `(module, side, limit)`: the
    floating-point tensors of its `input` or `output` are clamped to ±limit.
    """

    autocast: torch.dtype | None = None
    clamp: tuple[nn.Module, str, float] | None = None


def run(
    snapshot: BatchSnapshot,
    names: Mapping[nn.Module, str],
    change: Change | None = None,
    allows: Allows = nothing_allowed,
    *,
    backward: bool = False,
    start: BackwardStart | None = None,
    follows: bool = False,
    squares: bool = False,
) -> Experiment:
    """Run the batch of `snapshot` once more; keep what its forward raises as the error. KeyboardInterrupt passes.

    With `backward` the run has a graph, and a backward follows from the outputs of the batch, as if their mean were the
    loss, one as if the mean of their squares were, with `squares`, and one from `start`. A run that `follows` knows the
    operation that began its first bad value. A watch of the model sees nothing of it.
    """
    experiment = Experiment(provenance=ProvenanceMode(run.__code__) if follows else None)
    change = change or Change()
    starts: dict[str, Tensor] = {}
    number = -1

    def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal number
        name = names.get(module, "?")
        output, call, seen_values = _changed_call(module, args, kwargs, change, name, allows)
        experiment.calls.append(call)
        for (_, x), record in zip(seen_values, call.rows, strict=True) if follows else ():
            if record.is_fault and isinstance(x, Tensor):
                experiment.note_origin(x, record)
        if start is not None and start.name == name:
            number += 1
            if number == start.number:
                starts.update((label, x) for label, x in with_graph(output) if label in start.gradients)
        return output

    try:
        again, wanted = with_leaves(snapshot) if backward else (snapshot, [])
        graph = torch.enable_grad() if backward else nullcontext()
        with again.again() as call, graph, experiment.provenance or nullcontext():
            with wrap_calls(snapshot.module.modules(), seen):
                output = call()
            experiment.results = [x.detach() for _, x in leaves(output, "output") if isinstance(x, Tensor)]
            if start is not None and starts:
                given = [start.gradients[label].to(x.dtype) for label, x in starts.items()]
                run_backward(list(starts.values()), wanted, given, experiment.keep_gradients)
            if ends := [x for _, x in with_graph(output) if backward]:
                run_backward(ends, wanted, mean_gradients(ends), experiment.keep_gradients)
                if squares:
                    given = [2 * x.detach() / max(x.numel(), 1) for x in ends]
                    run_backward(ends, wanted, given, experiment.keep_gradients)
    except Exception as error:
        # Without its traceback, whose frames hold the activations of the run.
        experiment.error = error.with_traceback(None)
    finally:
        if experiment.provenance is not None:
            experiment.provenance.active = False
    return experiment


def gradient_record(x: Tensor, label: str) -> Record:
    """Return the record of a gradient."""
    return observe(x, label, "gradient")


def with_leaves(snapshot: BatchSnapshot) -> tuple[BatchSnapshot, list[Tensor]]:
    """Return the snapshot with new leaves for tensors that require a gradient, and all leaves of a backward.

    The graph behind what the batch was called with is the user's.
    """
    given = snapshot.args, dict(snapshot.kwargs)
    (args, kwargs), made = fresh_leaves(given, lambda x: x.requires_grad)
    wanted = [*(x for x in snapshot.module.parameters() if x.requires_grad), *made]
    return replace(snapshot, args=args, kwargs=kwargs), wanted


def fresh_leaves(given: Any, is_wanted: Callable[[Tensor], bool]) -> tuple[Any, list[Tensor]]:
    """Return the values with new tensors for those that are wanted, and the leaves of the graph that they come from."""
    made: list[Tensor] = []

    def fresh(x: Tensor) -> Tensor:
        if not is_wanted(x):
            return x
        made.append(x.detach().requires_grad_())
        return made[-1].clone()  # a leaf could not be written to

    with torch.enable_grad():
        return tree_map_only(Tensor, fresh, given), made


def run_backward(
    roots: list[Tensor], wanted: Sequence[Any], gradients: list[Tensor], hook: Callable[[Any], Any]
) -> None:
    """Run a backward from these gradients of the roots to the wanted tensors or edges of the graph, with `hook(node)`
    at each node.
    """
    handles = [node.register_hook(hook(node)) for node in graph_nodes(x.grad_fn for x in roots) if node]
    try:
        with ExitStack() as modes, without_hooks([x for x in wanted if isinstance(x, Tensor)]):
            for kind in autocast_kinds():  # a backward runs behind the block of the forward's autocast
                modes.enter_context(torch.autocast(kind, enabled=False))
            torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def without_hooks(tensors: list[Tensor]) -> Iterator[None]:
    """Take the user's hooks off these for the block: they may add up gradients. The engine holds the dict, so it is
    emptied and filled again.
    """
    kept = [(hooks, dict(hooks)) for x in tensors if (hooks := x._backward_hooks)]
    try:
        for hooks, _ in kept:
            hooks.clear()
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def graph_nodes(roots: Any, since: int = 0) -> list[Any]:
    """Return all nodes of the graph from these roots on, each once, back to the autograd sequence number `since`."""
    left, nodes = list(roots), dict[Any, None]()
    while left:
        node = left.pop()
        if node is not None and node not in nodes and node._sequence_nr() >= since:
            nodes[node] = None
            left += [following for following, _ in node.next_functions]
    return list(nodes)


def with_graph(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of a module's output that have a graph, with their labels."""
    yield from (
        (label, x) for label, x in leaves(output, "output") if isinstance(x, Tensor) and x.requires_grad
    )


def mean_gradients(outputs: list[Tensor]) -> list[Tensor]:
    """Return for each tensor the gradient that the mean of its elements gives it, as a loss would."""
    return [torch.full_like(x, 1 / max(x.numel(), 1)) for x in outputs]


def _changed_call(
    module: nn.Module, args: Any, kwargs: Any, change: Change, name: str, allows: Allows
) -> tuple[Any, ObservedCall, list[Leaf]]:
    kinds = {
        kind: torch.get_autocast_dtype(kind) for kind in autocast_kinds() if torch.is_autocast_enabled(kind)
    }
    given = first_float((args, kwargs))
    side = change.clamp[1] if change.clamp is not None and change.clamp[0] is module else ""
    if change.clamp is not None and side == "input":
        args, kwargs = _clamped((args, kwargs), change.clamp[2])
    with ExitStack() as modes:
        for kind, dtype in kinds.items():
            # Here and not around the whole: a model may enter autocast in its own forward.
            if change.autocast is not None and dtype is torch.float16:
                modes.enter_context(torch.autocast(kind, change.autocast, cache_enabled=False))
        output = module._call_impl(*args, **kwargs)
    if change.clamp is not None and side == "output":
        output = _clamped(output, change.clamp[2])
    inputs, outputs = list(call_leaves(args, kwargs)), list(leaves(output, "output"))
    autocast = next((dtype for dtype in kinds.values() if dtype in NARROW), None)
    allowed = allows(name, module)
    rows = [observe(x, label, "input", allowed) for label, x in inputs]
    rows += [observe(x, label, "output", allowed) for label, x in outputs]
    return output, ObservedCall(name, tuple(rows), given, autocast), [*inputs, *outputs]


def _clamped(value: Any, limit: float) -> Any:
    return replaced(value, lambda x: x.clamp(-limit, limit) if x.dtype.is_floating_point else None)


def module_words(name: str) -> str:
    """Return the module in prose."""
    return f"`{name}`" if name else "the model"


def in_float32(model: nn.Module, name: str, *, cast_output: bool = True) -> str:
    """Return the words of the cure that runs this module of `model` in float32."""
    option = "" if cast_output else ", cast_output=False"
    return f"run {module_words(name)} in float32, nanwatch.run_in_fp32({code_of(model, name)}{option})"


def code_of(model: nn.Module, name: str) -> str:
    """Return the expression that reaches the module in Python: `model.decoder.block[0]`."""
    path = next(
        (named.path for named in named_modules(model, remove_duplicate=False) if named.name == name), name
    )
    code, module = "model", model
    for part in path.split(".") if path else ():
        if isinstance(module, nn.ModuleList | nn.Sequential) and part.isdecimal():
            code += f"[{part}]"
        elif isinstance(module, nn.ModuleDict):
            code += f"[{part!r}]"
        elif part.isidentifier():
            code += f".{part}"
        else:
            return f"model.get_submodule({path!r})"
        module = module._modules[part]  # type: ignore[assignment]
    return code


@dataclass
class Trials:
    """Trials of changes on the batch of one finding, and the judge of them. Cures that work go to `cures`.

    `is_unseen`: no output of a module and no gradient of one shows the bad value.
    """

    snapshot: BatchSnapshot
    finding: Finding
    model: nn.Module
    start: BackwardStart | None = None
    conditions: Conditions = NO_CONDITIONS
    is_unseen: bool = False
    cures: list[Cure] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    runs: int = 0
    _truth: list[Tensor] | None = None
    _is_known: bool = False

    def __post_init__(self) -> None:
        self.names = module_names(self.model)
        # The module in whose code the value was made, None for code outside of all.
        is_produced = self.finding.origin == "produced"
        self.guilty = self.finding.module if is_produced else self.finding.source_module

    def run(
        self,
        hold: Callable[[], AbstractContextManager[Any]] = nullcontext,
        change: Change | None = None,
        snapshot: BatchSnapshot | None = None,
        start: BackwardStart | None = None,
        *,
        follows: bool = False,
        squares: bool = False,
    ) -> Experiment:
        """Run the batch under a change, forward and backward."""
        self.runs += 1
        snapshot, start = snapshot or self.snapshot, start or self.start
        with hold():
            return run(
                snapshot,
                self.names,
                change,
                self.conditions.allows,
                backward=snapshot.grad,
                start=start,
                follows=follows,
                squares=squares,
            )

    def is_finite(self, experiment: Experiment) -> bool:
        """Return whether all is finite. Bad data stays bad: then the outputs and the gradients have to be."""
        is_given = self.finding.origin in ("data", "buffer")
        bad = [label for _, label in experiment.nonfinite() if label.startswith("output") or not is_given]
        return experiment.error is None and not bad and not experiment.bad_gradients

    def in_float64(
        self, around: Callable[[], AbstractContextManager[Any]] = nullcontext, *, backward: bool = False
    ) -> tuple[list[Tensor] | None, bool]:
        """Return what the batch gives in float64, None where it raises there, and whether all its gradients are finite.

        The results of the first run, in which nothing is changed, are the measure of all trials.
        """
        (wide, mode), experiment = widened(self.snapshot), Experiment()
        results: list[Tensor] | None
        again, leaves_given = with_leaves(wide) if backward else (wide, [])
        graph = torch.enable_grad() if backward else nullcontext()
        module = self.snapshot.module
        try:
            with again.again() as call, loaded(module, torch.float64), around(), graph:
                with mode:
                    output = call()
                if ends := [x for _, x in with_graph(output) if backward]:
                    weights = [x for x in module.parameters() if x.requires_grad]
                    wanted = [*weights, *leaves_given[len(weights) :]]
                    run_backward(ends, wanted, mean_gradients(ends), experiment.keep_gradients)
            results = [x.detach() for x in tensors_in(output)]
        except Exception:
            suppressed("a batch could not be run in float64")
            results = None
        if not self._is_known:
            self._truth, self._is_known = results, True
        return results, not experiment.bad_gradients

    @property
    def is_compared(self) -> bool:
        """Return whether float64 gives results that float32 can hold."""
        return any(bool((x.abs() <= LARGEST).any()) for x in self._truth or () if x.is_floating_point())

    def agreement(
        self, experiment: Experiment, values: Sequence[Tensor] = (), exact: Sequence[Tensor] = ()
    ) -> Agreement:
        """Compare the results of a trial with those of float64, and tell what it moves.

        `values` are those of the changed expression, and `exact` what they are in float64. A guard that moves them by
        the epsilon of a textbook at most is right at a pole where the gradient of float64 fails too, whatever scale the
        results have.
        """
        if not self._is_known:
            self.in_float64()
        close = agreement(experiment.results, self._truth)
        farthest, words = moved(values, exact)
        is_small = not close.is_close and 0 < farthest <= MOST_BY_GUARD
        if is_small and self.snapshot.grad and not self.in_float64(backward=True)[1]:
            close = Agreement(True, f"float64's gradient fails too; {close.words}")
        return Agreement(close.is_close, "; ".join(filter(None, [close.words, words])))
