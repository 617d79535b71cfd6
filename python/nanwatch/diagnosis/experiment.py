"""Experiments: the batch run once more under some change, what every module call and every backward saw, and a judge.

A backward of a re-run goes through torch.autograd.grad, so that no `.grad` is touched and no hook of the user's runs.
A change works if all is finite with it, and near what float64 gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, nan
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree

from ..instrumentation.execution_context import wrap_calls
from ..instrumentation.wrapped_names import module_names
from ..numerics._extension import instances_of
from ..numerics._reference import _to_arithmetic
from ..precision.precision import NARROW, autocast_kinds, cast
from ..recording.masks import Excuses, excuses
from ..recording.observe import observe
from ..recording.walk import call_leaves, leaves
from ..records.record import Record
from ..report.finding import Cure, Finding
from ..util.messages import spell
from ..util.program import nodes_behind, parameters_of
from . import isolation
from .batch_snapshot import BatchSnapshot, left_calls
from .formats import MOST_ELEMENTS, Float64, loaded
from .provenance import ProvenanceMode, Step, values_of

# `allows(name, module)` is True where infinities in this module are meant, or the judge of its values.
Allows = Callable[[str, nn.Module], bool | Excuses]
# Makes a call of a module, `make(module, *args, **kwargs)`, with the change that is tried.
MakeCall = Callable[..., Any]
make_call: MakeCall = nn.Module._call_impl
Hold = Callable[[], AbstractContextManager[Any]]
Room = Callable[["Experiment"], float | None]
UNTRIED = "the loss was not tried"
_LEFT_OUT = (
    "in the forward {} made a bad value that is left out of the result, as by `torch.where` or by a product with 0; its"
    " gradient in {} is 0 times that, which is nan"
)
# A working change moves the results by at most 1 % of their norm. More would make another model.
_MOST_CHANGE = 0.01
# Or each element by at most this: the angle of equal vectors is 1.4e-3 where its cosine is kept 1e-6 below 1.
MOST_BY_GUARD = 3e-3
# Elements above this may be bounded: the logarithm of 1e-4, the least that float16 is guarded with, is -9.2.
_LARGE = 9.0
# A bound in float32 is no less right because float64 goes on to 1e+51.
_LARGEST = torch.finfo(torch.float32).max
# A loss that squares an output past this overflows, and the batch of a forward has no loss yet. So no value past it is
# worth keeping.
_SQUARABLE = _LARGEST**0.5
# Three steps of a healthy training move the weights by about their norm, three of an exploding one by far more.
_NUM_STEPS = 3
_MOST_MOVED = 1000.0
# Bits. With less, the next batch whose values are twice as large fails again.
LEAST_ROOM = 1.0


class LossModule(nn.Module):
    """A module that makes a loss, of the call of `called` if that is set; `untried` says in words why it made none."""

    called: nn.Module | None
    untried: str


def nothing_allowed(_: str, module: nn.Module) -> bool | Excuses:
    """Allow no value but masks."""
    return excuses(module)


class SettledError(BaseException):
    """A run has shown what was asked of it, and ends. Code of the program that catches Exception lets it pass."""


class ObservedCall(NamedTuple):
    """One module call: its inputs and outputs, and the narrow format of autocast where it was on."""

    name: str
    records: list[Record]
    autocast: torch.dtype | None


@dataclass(slots=True)
class Experiment:
    """A run: its calls in the order in which they ended, what the batch returned, and what its backwards made.

    `error` is the exception that ended it, if one did. `given` are the gradients that its first backward began with.
    Where the run followed its values, `fault` is the first bad tensor of a call, with that call and the call around it,
    `failure` the operation that began the first bad value, and `bad_gradient` that of the first bad gradient. `untried`
    says in words that the loss was not reached; else `loss` is that. It `trains` if a leaf of the graph has a gradient
    other than 0. One that only `judges` a change ends with the first bad result.
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
    untried: str = ""
    loss: float = nan
    trains: bool = False
    judges: bool = False

    def records(self, name: str | None) -> list[Record]:
        """Return the records of all calls of that module."""
        return [record for call in self.calls if call.name == name for record in call.records]

    def bad_labels(self) -> list[str]:
        """Return the label of each value of a call or a backward that is non-finite and should not be."""
        records = [*(record for call in self.calls for record in call.records), *self.gradients]
        return [record.label for record in records if record.is_fault]

    def keep_gradients(self, node: Any, made: Sequence[Tensor | None], _: Any) -> None:
        """Keep the gradients that a node of the graph has made, and the operation that began the first bad one."""
        for x in filter(lambda x: x is not None, made):
            record = observe(x, "gradient", "gradient")
            self.gradients.append(record)
            if not record.is_fault or self.bad_gradient is not None or self.provenance is None:
                continue
            step = self.provenance.origin(x, record)  # type: ignore[arg-type]
            is_finite = not any(observe(y, "", "output").is_fault for y in self.results)
            left_out = step is not None and not step.meant and not step.in_backward and is_finite
            remarks = (
                (_LEFT_OUT.format(step.operation, node.name()),) if step is not None and left_out else ()
            )
            if step is None or step.meant or (left_out and not step.is_maker):
                # A bad value that was given, and left out, is no fault.
                place, module = self.provenance.site_of(node)
                step = Step(0, node.name(), values_of(record), place=place, module=module)
            step.remarks += remarks
            self.bad_gradient = step
            if self.failure is None or is_finite:
                self.failure, self.failed_in_backward = step, True
        self.end_if_settled(self.gradients)

    def end_if_settled(self, records: Sequence[Record]) -> None:
        """Raise SettledError if the run judges a change and one of these shows that it does not work."""
        is_known = self.judges and (self.provenance is None or self.failure is not None)
        if is_known and any(record.is_fault and record.role != "input" for record in records):
            raise SettledError


def run(
    snapshot: BatchSnapshot,
    names: Mapping[nn.Module, str],
    make: MakeCall = make_call,
    allows: Allows = nothing_allowed,
    *,
    follows: bool = False,
    sought: tuple[nn.Module, str] | None = None,
    squares: bool = False,
    divisor: float = 1.0,
    sets_grad: bool = False,
    judges: bool = False,
) -> Experiment:
    """Run the batch of `snapshot` once more; keep what its forward raises as the error. KeyboardInterrupt passes.

    make: makes each call of a module.
    follows: whether to find the operation that began the first bad value. Its mode knows the calls under way.
    sought: the module, and the label of the bad value, whose operation is asked for. The run ends with this value.
    divisor: the gradients that the backward begins with are divided by it.
    sets_grad: whether the leaves get their gradients as `.grad`, which only a process that is thrown away may do.
    judges: whether to end with the first bad output or gradient, and the operation that began it if it `follows`.

    A batch with a graph has a backward too, from its outputs, as if their mean were the loss, and with `squares` one as
    if the mean of their squares were. A watch of the model sees nothing of it.
    """
    provenance = ProvenanceMode(run.__code__) if follows else None
    experiment = Experiment(provenance, judges=judges)
    open_calls = [] if provenance is None else provenance.open_calls
    versions = {id(x): version for x, version in snapshot.versions}

    def keep(call: BatchSnapshot, output: Any, autocast: torch.dtype | None) -> None:
        if open_calls and open_calls[-1] is call:
            open_calls.pop()
        allowed = allows(call.name, call.module)
        inputs, outputs = call_leaves(call.args, call.kwargs), leaves(output, "output")
        records = [observe(x, label, "input", allowed) for label, x in inputs]
        records += [observe(x, label, "output", allowed) for label, x in outputs]
        experiment.calls.append(ObservedCall(call.name, records, autocast))
        for (_, x), record in zip((*inputs, *outputs), records, strict=True):
            is_sought = sought is None or (call.module is sought[0] and record.label == sought[1])
            if is_sought and record.is_fault and provenance is not None:
                # A receiver that nobody called was called by the batch.
                experiment.fault = experiment.fault or (x, call, open_calls[-1] if open_calls else call)
                experiment.failure = experiment.failure or provenance.origin(x, record)
                if sought is not None:
                    raise SettledError
        experiment.end_if_settled(records)

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
            output = make(module, *args, **kwargs)
        except Exception as error:
            # A hook that looks for bad values itself has left the output.
            left = next((left.output for left in left_calls(error) if left.module is module), ())
            keep(call, left, autocast)
            raise
        keep(call, output, autocast)
        return output

    try:
        again, graph = snapshot, torch.enable_grad() if snapshot.grad else nullcontext()
        if snapshot.grad:
            # The graph behind the tensors is the user's, so they get new leaves, and a leaf could not be written to.
            fresh = lambda x: x.detach().requires_grad_().clone() if x.requires_grad else x  # noqa: E731
            with graph:
                args, kwargs = _pytree.tree_map_only(Tensor, fresh, (snapshot.args, dict(snapshot.kwargs)))
            again = replace(snapshot, args=args, kwargs=kwargs)
        with again.again() as call, graph, provenance or nullcontext():
            with wrap_calls((*names, *snapshot.module.modules()), seen):
                output = call()
            makes_loss = isinstance(snapshot.module, LossModule)
            experiment.untried = str(snapshot.module.untried) if makes_loss else UNTRIED
            results = [x for _, x in leaves(output, "output") if isinstance(x, Tensor)]
            experiment.results = [x.detach() for x in results]
            if roots := [x for x in results if snapshot.grad and x.requires_grad]:
                given = [torch.full_like(x, 1 / max(x.numel(), 1) / divisor) for x in roots]
                experiment.given = [observe(x, "gradient", "gradient") for x in given]
                experiment.loss = nan if experiment.untried else float(roots[0].detach().float().mean())
                squared = [2 * x.detach() * gradient for x, gradient in zip(roots, given, strict=True)]
                for gradients in (given, squared) if squares and experiment.untried else (given,):
                    run_backward(experiment, roots, gradients, sets_grad)
    except SettledError:
        pass
    except Exception as error:
        # Without its traceback, whose frames hold the activations of the run.
        experiment.error = error.with_traceback(None)
    finally:
        if provenance is not None:
            provenance.active = False
    return experiment


def run_backward(
    experiment: Experiment, roots: list[Tensor], gradients: list[Tensor], sets_grad: bool = False
) -> None:
    """Run a backward from these gradients of the roots to the leaves of their graph. Keep what each node makes."""
    nodes = nodes_behind(roots)
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
        made = torch.autograd.grad(roots, ends, gradients, retain_graph=True, allow_unused=True)
    experiment.trains |= any(bool(x.any()) for x in made if x is not None)
    for leaf, gradient in zip(ends, made, strict=True) if sets_grad else ():
        leaf.grad = gradient


@dataclass
class Trials:
    """Trials of changes on the batch of one finding. Cures that work go to `cures`.

    `guilty` is the module in whose code the value was made, None for code outside of all. `allows` tells which
    infinities are meant, and `loss_scale` is None where it is not known. `exact` is the first run in float64, which is
    the measure of all trials.
    """

    snapshot: BatchSnapshot
    finding: Finding
    model: nn.Module
    allows: Allows = nothing_allowed
    loss_scale: float | None = None
    cures: list[Cure] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    runs: int = 0
    exact: Experiment | None = None

    def __post_init__(self) -> None:
        self.names = module_names(self.model)
        is_producer = self.finding.origin == "produced"
        self.guilty = self.finding.module if is_producer else self.finding.source_module

    def run(
        self,
        hold: Hold = nullcontext,
        make: MakeCall = make_call,
        snapshot: BatchSnapshot | None = None,
        **options: Any,
    ) -> Experiment:
        """Run the batch under a change, forward and backward, with the options of `experiment.run`."""
        self.runs += 1
        with hold():
            experiment = run(snapshot or self.snapshot, self.names, make, self.allows, **options)
        # The program kept graphs, as those of log-probabilities, which its own backward has freed.
        is_freed = "backward through the graph a second time" in str(experiment.error)
        if is_freed and self.finding.phase == "forward":
            experiment.error, experiment.untried = None, "the backward was not tried, as its graph is freed"
        return experiment

    def attempt(
        self, what: str, *change: Any, room: Room | None = None, is_expected: bool = False, **options: Any
    ) -> bool:
        """Try a change, given as `run` takes it. Keep it as a cure if it works. Return whether it does.

        `room` returns the bits of headroom that a trial leaves. A change that works leaves one. One that a user would
        expect to work is also kept where it does not.
        """
        experiment = self.run(*change, **options)
        if experiment.error is not None:
            self.remarks.append(f"could not try to {what}: {spell(experiment.error)}")
            return False
        works, effect = self.judge(experiment)
        if effect and not works:
            self.remarks.append(f"with a change the batch is finite, but {effect}: {what}")
        bits = room(experiment) if works and room else None
        works = works and (bits is None or bits >= LEAST_ROOM)
        effect = experiment.untried if room else effect
        self.cures += [Cure(what, works, bits, "", effect)] if works or is_expected else []
        return works

    def judge(
        self,
        experiment: Experiment,
        values: Sequence[Tensor] = (),
        exact: Sequence[Tensor] = (),
        truth: Experiment | None = None,
    ) -> tuple[bool, str]:
        """Return whether a trial works, and in words what it moves, "" where not all is finite.

        Bad data stays bad: then the outputs and the gradients have to be finite. The results have to be near those of
        float64. `values` are those of the changed expression, and `exact` what they are in float64. A guard that moves
        them by the epsilon of a textbook at most is right at a pole where the gradient of float64 fails too, whatever
        scale the results have. One that moves most of them is wrong. `truth` is the run in float64, if it is another
        than that of the batch.
        """
        is_given = self.finding.origin in ("data", "buffer") or self.finding.is_of_loss
        bad = [label for label in experiment.bad_labels() if not (is_given and label.startswith("input"))]
        if experiment.error is not None or bad:
            return False, ""
        truth = truth or self.exact or self.in_float64()
        is_close, words = compared(experiment.results, truth.results)
        farthest, is_most, effect = _moved(values, exact)
        if not is_close and 0 < farthest <= MOST_BY_GUARD and "gradient" in truth.bad_labels():
            is_close, words = True, f"float64's gradient fails too; {words}"
        is_close &= not is_most
        return is_close, "; ".join(filter(None, [words, effect, experiment.untried]))

    def explosion(self, hold: Hold) -> str:
        """Return in words how far some steps move the weights under a change; "" for not far, or where not known."""
        _, moved, _ = self.train(_NUM_STEPS, hold) or ([], 0.0, None)
        if moved <= _MOST_MOVED:
            return ""
        kinds = " and ".join(type(x).__name__ for x in self.optimizers())
        return f"{_NUM_STEPS} steps of {kinds} then move the weights by {moved:.1e} times their norm"

    def optimizers(self) -> list[Optimizer]:
        """Return the user's optimizers of the model's weights; [] where it is not known what a step does.

        It is not for code that scales the loss or clips the gradients, nor for the program's own optimizers.
        """
        of_model = {*map(id, self.model.parameters())}.intersection
        optimizers = [x for x in instances_of(Optimizer) if of_model(map(id, parameters_of(x)))]
        names = (name for frame, _ in walk_stack(None) for name in frame.f_code.co_names)
        is_other = self.loss_scale is not None or any("clip_grad" in name for name in names)
        is_other |= any(not type(x).__module__.startswith("torch.optim.") for x in optimizers)
        return [] if is_other else optimizers

    def train(
        self,
        num_steps: int,
        hold: Hold = nullcontext,
        begins: Callable[[Sequence[Optimizer]], Any] = bool,
        clip: float = inf,
    ) -> tuple[list[float], float, Any] | None:
        """Take steps of the user's optimizers on the batch, in a process that is thrown away, which `begins` them.

        `clip` is the largest norm of the gradients. Return the loss before each step, and how far all move the weights
        in multiples of their norm, and what `begins` returned; None where the steps cannot be taken, as beside CUDA.
        """
        weights, optimizers = [*self.model.parameters()], self.optimizers()
        is_large = sum(x.numel() for x in weights) > MOST_ELEMENTS
        if not optimizers or is_large or not isolation.is_child():
            return None

        def steps() -> tuple[list[float], float, Any]:
            begun = begins(optimizers)
            before, losses = [x.detach().clone() for x in weights], list[float]()
            for _ in range(num_steps):
                self.model.zero_grad()
                losses.append(self.run(hold, sets_grad=True).loss)
                if clip < inf:
                    nn.utils.clip_grad_norm_(weights, clip)
                with torch.no_grad():
                    for optimizer in optimizers:
                        inspect.unwrap(type(optimizer).step)(optimizer)  # without the hooks of a watch
            moves = [x.detach() - y for x, y in zip(weights, before, strict=True)]
            norm = nn.utils.get_total_norm(before).clamp(min=1)
            return losses, float(nn.utils.get_total_norm(moves) / norm), begun

        isolation.send()
        with suppress(isolation.ChildEndedError):
            *_, made = isolation.run_in_child(steps, self.snapshot.seconds)
            return made  # type: ignore[no-any-return]
        return None

    def in_float64(self, around: Hold = nullcontext) -> Experiment:
        """Run the batch in float64, under a change that only looks."""

        def make(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not self.snapshot.module:
                return make_call(module, *args, **kwargs)
            args, kwargs = cast((args, kwargs), (torch.float32, *NARROW), torch.float64)
            with loaded(module, torch.float64), Float64():
                return make_call(module, *args, **kwargs)

        with around():
            experiment = run(self.snapshot, self.names, make, self.allows)
        self.exact = self.exact or experiment
        return experiment


def compared(values: Sequence[Tensor], truth: Sequence[Tensor]) -> tuple[bool, str]:
    """Compare results with those of float64, at the elements that float64 gives as finite, and float32 can hold."""
    pairs = [*zip(values, truth, strict=False)]  # one of the two may not have reached the loss
    if not pairs or any(x.shape != y.shape for x, y in pairs):
        return True, "not compared with float64"
    pairs = [(x, y) for x, y in pairs if x.is_floating_point() or x.is_complex()]
    unknown = [rest for x, y in pairs if (rest := _known(x, y, _LARGEST)[-1]).numel()]
    # A format of 8 bits rounds by more than 1 %.
    known = [(*_known(x, y, _SQUARABLE), max(_MOST_CHANGE, torch.finfo(x.dtype).eps / 2)) for x, y in pairs]
    failing = sum(rest.numel() for rest in unknown)
    guarded = max((float(rest.real.nan_to_num(0, 0).max()) for rest in unknown), default=0.0)
    if guarded > _SQUARABLE and all(x.dtype is not torch.float64 for x, _ in pairs):
        return False, f"the result is {guarded:.3g} where float64 fails, and its square would overflow"
    # A loss that fails in float64 is not compared, though outputs of the model beside it are.
    is_lost = any(rest.numel() and not right.numel() for right, *_, rest, _ in known)
    is_finite = all(_to_arithmetic(y).isfinite().all() for _, y in pairs)
    fails = "float64 gives more than float32 holds" if is_finite else "as it is, it fails in float64 too"
    known = [x for x in known if x[0].numel()]
    if not known:
        return True, fails
    largest = max(float(right.abs().max()) for right, *_ in known)
    errors = [float(distance.max()) for _, distance, *_ in known]
    is_near = [float(distance.norm()) <= most * float(right.norm()) for right, distance, *_, most in known]
    if not all(near or error <= MOST_BY_GUARD for near, error in zip(is_near, errors, strict=True)):
        words = f"the result is {max(errors):.3g} away from that of float64, of values up to {largest:.3g}"
        return False, words
    words = f"moves the result by {max(errors):.1e} from that of float64"
    if is_lost:
        return True, fails if all(is_near) else f"{words}; {fails}"
    if all(is_near):
        words = f"agrees with float64, to {max(errors) / (largest or 1):.1e} of the largest value"
    return True, words + (f"; as it is, it fails in float64 at {failing:,} elements too" if failing else "")


def _moved(values: Sequence[Tensor], truth: Sequence[Tensor]) -> tuple[float, bool, str]:
    """Return how far a guard moves the values of its expression from those of float64, and in words; "" for none.

    Between the two: whether it moves most of them, as quotients where the eps is far above the divisor.
    """
    pairs = zip(values, truth, strict=False)
    known = [_known(x, y, inf) for x, y in pairs if x.shape == y.shape and x.is_floating_point()]
    right, distance, new, _ = map(torch.cat, zip(*known, strict=True)) if known else (torch.empty(0),) * 4
    is_off = distance > _MOST_CHANGE * right.abs() + 1e-6 * right.abs().max() if right.numel() else right
    if not is_off.any():
        return 0.0, False, ""
    i = int(distance.argmax())
    # The deviation of two values is 0.7 times as large without the correction.
    is_other = (2 * distance > right.abs()) & (distance > MOST_BY_GUARD) & (right.abs() < _LARGE)
    example = f"{float(new[i]):.3g} for {float(right[i]):.3g}"
    count = f"{int(is_off.sum()):,} of {len(right):,} elements of that expression"
    words = f"{count} are not those of float64: {example}"
    return float(distance[i]), 2 * int(is_other.sum()) > len(right), words


def _known(value: Tensor, exact: Tensor, most: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the elements of `exact` that are finite and at most `most`, how far those of `value` are, and these.

    The last are the elements of `value` everywhere else.
    """
    value, exact = _to_arithmetic(value), _to_arithmetic(exact)
    kind = torch.promote_types(torch.promote_types(value.dtype, exact.dtype), torch.float64)
    value, exact = value.to(kind), exact.to(kind)
    is_known = exact.isfinite() & (exact.abs() <= most)
    new, right = value[is_known], exact[is_known]
    return right, (right - new).abs().nan_to_num(torch.inf, torch.inf), new, value[~is_known]
