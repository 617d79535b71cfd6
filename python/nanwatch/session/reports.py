"""The starts of batches, from which a re-run begins, and the reports of one Watch.

A report is about the latest frames, a non-finite call, or the calls that an exception left.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..diagnosis.batch_snapshot import (
    BatchSnapshot,
    BufferHistory,
    LeftCall,
    draws_outside_torch,
    left_calls,
    open_calls,
)
from ..diagnosis.causes import take_apart
from ..diagnosis.incident import Incident
from ..diagnosis.loss_statements import ProgramCall
from ..history.monitor import Suspicion
from ..instrumentation.execution_context import RngState
from ..instrumentation.functions import Function
from ..instrumentation.wrapped_names import (
    find_module,
    is_recorded,
    named_modules,
    parameter_owners,
    unwrapped,
)
from ..recording.events import Event, Recorder, versions_of
from ..recording.masks import Excuses, excuses
from ..recording.observe import may_be_called, observe, parameter_mesh, state_of, state_tensors
from ..recording.walk import Leaf, call_leaves, leaves
from ..records.record import Frame, Record, Role
from ..report.finding import OPTIMIZER, Finding, OriginKind, find, finding_of, growing, with_earlier
from ..report.report import Report
from ..report.text import culprit
from ..util.job import rank
from ..util.messages import suppressed, suppressing
from ..util.program import is_in, nodes_behind, parameters_of

if TYPE_CHECKING:
    from .api import Options

# A host's remarks on a finding, whose record is None where no frame has it.
Describe: TypeAlias = Callable[[Finding, Record | None], tuple[str, ...]]

ModelRef: TypeAlias = Callable[[], nn.Module | None]

_NO_MODULE = nn.Module()
_STATE: dict[Role, OriginKind] = {"weight": "weight", "buffer": "buffer"}
_WRITTEN = (
    "`{}` was written to, in place, since the batch began: whether it came in finite is no longer known, but the model"
    " wrote to it"
)


def model_ref(model: nn.Module) -> ModelRef:
    """Return a weak reference to a model. Once that is gone it gives a module with the children that are left, if any.

    A list of model and loss may live for no longer than the call of `watch`.
    """
    whole = weakref.ref(model)
    children = weakref.WeakValueDictionary({key: x for key, x in model._modules.items() if x is not None})

    def alive() -> nn.Module | None:
        if (model := whole()) is None and (left := dict(children.items())):
            model = nn.Module()
            model._modules.update(left)
        return model

    return alive


class Starts:
    """Starts of the batches of a Watch. The recorder keeps them, and asks `batch_started` for what Python has of them.

    The start of a batch whose backward has failed, and that backward, are kept until a step was checked.
    """

    def __init__(self, model: ModelRef, recorder: Recorder, options: Options) -> None:
        self._model, self._recorder = model, recorder
        recorder.keeps_starts = options.reruns
        # For each batch of a model whose code may draw from random or numpy.random.
        self._entries = recorder.subscribe(Event.BATCH_START)
        self._entries.active = False
        if options.reruns:
            recorder.watch_generators(vars(torch.cuda))
        self._buffers = BufferHistory()
        self._draws: bool | None = None
        # The start refers to `_NO_MODULE`: a model that keeps this start would else keep itself alive.
        self._failed: tuple[int, weakref.ref[nn.Module], BatchSnapshot] | None = None
        self._backward: dict[int, ProgramCall | None] = {}  # the latest alone, by its batch: it holds tensors
        self.has_kept = False  # for a backward that has failed

    def batch_started(self, module: nn.Module | None) -> object:
        """Return what the start of a batch has beside the recorder's part."""
        if module is None or not self._recorder.keeps_starts:
            return None
        try:  # no context manager, which takes 1 µs
            watched = self._model()
            model = module if watched is None else watched  # a module's truth is its own
            if self._draws is None:
                self._draws = self._entries.active = draws_outside_torch(model)
            buffers = self._buffers.note(model)
            self._recorder.watch_buffers(self._buffers.names())
            return buffers, RngState.capture(others=True).others if self._draws else ()
        except Exception:
            suppressed("the values of buffers could not be kept for a re-run")
            return None

    def changes(self) -> tuple[set[int], set[int]]:
        """Return the ids of tensors in this thread's batch that were written to, and that were added, since it began.

        Lists and dicts of the batch tell what was added to them. What was added to other objects, a re-run finds.
        """
        if (start := self._recorder.start()) is None:
            return set(), set()
        before = {id(x): version for x, version in start.versions}
        now = {id(x): version for x, version in versions_of(start.args, start.kwargs)}
        written = {key for key, version in now.items() if before.get(key, version) != version}
        gone = [x for x, version in start.versions if id(x) not in now and x._version == version]
        # What has replaced bad data may have it from there, as a grown cache.
        is_bad = any(observe(x, "", "input").is_fault for x in gone)
        return written, set() if is_bad else now.keys() - before.keys()

    def let_go(self) -> None:
        """Let go of all that was kept for a backward, as a step takes its gradients."""
        self._recorder.forget_starts()
        self._backward, self._failed, self.has_kept = {}, None, False

    def keep(self, batch: int) -> None:
        """Keep the start of the batch until a step takes the gradients, also when its graph is gone."""
        self.has_kept = True
        if (start := self.of_ended(batch)) is not None:
            self._failed = batch, weakref.ref(start.module), replace(start, module=_NO_MODULE)

    def backward_failed(self, batch: int, *, is_over: bool = False) -> None:
        """Keep the start of the batch, and the backward, under way or over, until a step takes the gradients."""
        self.keep(batch)
        # A later call is a part of what lies behind this one's outputs.
        starts = [start for start in self._recorder.ended_starts() if start.batch <= batch]
        first = min(starts, key=lambda start: start.batch, default=None)
        if first is None and self._failed is not None:
            return
        with suppressing("the statements of the loss could not be kept"):
            # A loss that draws numbers before it calls the model begins with the state at the last step. A model of
            # which methods alone are called has no start.
            known = [] if first is None else [self._recorder.step_generator, first.generator]
            rngs = [RngState(x, first.cuda) for x in known if first is not None and x is not None]
            find = ProgramCall.before_step if is_over else ProgramCall.of_backward
            self._backward = {batch: find(rngs)}

    def of_ended(self, batch: int) -> BatchSnapshot | None:
        """Return the start of a batch that has ended, if it is kept for its backward."""
        if self._failed is not None and self._failed[0] == batch:
            _, reference, snapshot = self._failed
            return None if (module := reference()) is None else replace(snapshot, module=module)
        starts = [BatchSnapshot.of(start) for start in self._recorder.ended_starts() if start.batch == batch]
        return next(filter(None, starts), None)

    def of(self, finding: Finding) -> tuple[BatchSnapshot | None, ProgramCall | None]:
        """Return the start of the failed batch of this thread, and its backward where that has failed."""
        if finding.phase == "backward":
            return self.of_ended(finding.batch), self._backward.get(finding.batch)
        start = self._recorder.start()
        return None if start is None else BatchSnapshot.of(start), None


class Reports:
    """Makes reports of the frames that a recorder holds, each with at most the latest `max_frames`.

    `model()` is None once the model is gone. `starts` has the starts of its batches.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, options: Options, suspicion: Suspicion) -> None:
        self.model, self.recorder, self.options = model_ref(model), recorder, options
        self.starts, self._suspicion = Starts(self.model, recorder, options), suspicion
        self.describe: Describe | None = None
        self.masks: list[str] = []  # outputs that hold masks, as entries of `allow`
        # Optimizers that have stepped, by id as some have no hash: how many parameters, and whether one is the model's.
        self.steppers: dict[int, tuple[weakref.ref[Optimizer], int, bool]] = {}
        self.num_steps = 0  # that optimizers of the model's weights have taken
        self.losses: deque[float] = deque(maxlen=8)  # that the recorder leaves to Python
        self._mesh = parameter_mesh(model)  # kept: a report may be asked for when the model has gone

    def excuses(self, name: str, module: nn.Module) -> bool | Excuses:
        """Return whether infinities in this module are meant, or the judge of a module that may hold masks or nans."""
        if not self.options.observes(name):
            return True  # it is not watched, so it is not judged either
        inf, nan = (self.options.allows(value, name, self.masks) for value in ("inf", "nan"))
        return excuses(module, inf=inf, nan=nan, reads_inputs="inputs" in self.options.read)

    def of(self, frames: Sequence[Frame], finding: Finding | None) -> Report:
        """Return the report of these frames, the oldest first; without a finding it is one of the latest batch."""
        self._mesh = mesh = tuple(dict.fromkeys((*self._mesh, *parameter_mesh(self.model()))))
        number = self.recorder.latest_batch if finding is None else finding.batch
        if finding is not None:
            losses = growing([*self.recorder.losses(), *self.losses])
            finding = replace(finding, num_steps=self.num_steps, losses=losses)
        uncalled = self._suspicion.never_called(tuple(frames), self.options.observes)
        suspects = () if finding is None else self._suspicion.suspects(tuple(frames))
        latest, batch = tuple(frames[-self.options.max_frames :]), None if number < 0 else number
        return Report(latest, finding, batch, parameter_mesh=mesh, never_called=uncalled, suspects=suspects)

    def latest(self, finding: Finding | None = None, more: Iterable[Frame] = ()) -> Report:
        """Return a report of the recorder's frames, and of `more` that it has not kept."""
        return self.of((*self.recorder.frames(), *more), finding)

    def of_frame(self, frame: Frame, origin: OriginKind = "received") -> Incident:
        """Return the failure of a frame that no forward has made, by its first fault. A weight or buffer is the origin.

        Without one, as where a tensor was written since it was found to be non-finite, it is the last record.
        """
        record = frame.fault or frame.records[-1]
        num_frames = self.recorder.frames_of_batch(frame.batch)
        finding = finding_of(frame, record, _STATE.get(record.role, origin), None, rank(), num_frames)
        return Incident(self.latest(self._explained(finding), [frame]))

    def of_taken(self, optimizer: Optimizer, parameters: Sequence[Tensor], batch: int) -> Incident:
        """Return the failure of the gradients of these parameters, which a step is about to take.

        They were finite or unseen in the backward. It names the first parameter whose module is called, as far as is
        known, else the nearest module around it that is.
        """
        model, called = self.model(), self._suspicion.called
        called |= {frame.name for frame in self.recorder.frames()} if called else set()
        owners = {} if model is None else parameter_owners(model)
        owned = [x for x in parameters if id(x) in owners]
        of_called = [x for x in owned if not called or owners[id(x)][0].name in called]
        parameter = (of_called or owned or parameters)[0]
        if model is None or not owned:  # it is beside the model
            name, class_name = OPTIMIZER, type(optimizer).__name__
            label = next(label for _, label, x in state_tensors(optimizer, {}) if x is parameter)
        else:
            owner, label = owners[id(parameter)]
            name = owner.name
            while name and called and name not in called:
                name, _, inner = name.rpartition(".")
                label = f"{inner}.{label}"
            class_name = type((find_module(model, name) or owner).module).__name__
        records = (observe(parameter.grad, f"{label}.grad", "gradient"),)
        # No hook has seen the gradient of a weight whose module is not called, nor any by default.
        is_unseen = owned and not of_called
        is_of_step = not is_unseen and self.options.gradients and self.recorder.latest_batch >= 0
        frame = Frame(batch, name, class_name, records, "step" if is_of_step else "backward")
        return self.of_frame(frame, "produced" if is_unseen else "received")

    def of_left_calls(self, error: Exception, batch: int) -> Report | None:
        """Return the report of the first non-finite one of the calls that the exception left; None without one."""
        calls = left_calls(error)  # none where it ended something else, such as a call in compiled code
        if (outer := self._first_nonfinite(batch, calls)) is None:
            return None
        given = self._arguments(calls[-1].args, calls[-1].kwargs, outer[0].fault)
        return self._of_first(batch, [*self.recorder.frames()], *outer, given)

    def of_call(self, nonfinite: Frame, caller: str | None, args: tuple[Any, ...], kwargs: Any) -> Report:
        """Return the report of the first non-finite call of a batch whose outermost call got `args` and `kwargs`.

        `nonfinite` is the frame of the call that was met: frames of other threads may have pushed it out of the
        recorder since. `caller` is the module that made it.
        """
        batch, frames, kwargs = nonfinite.batch, [*self.recorder.frames()], kwargs or {}
        if all(frame.fault is None for frame in frames if frame.batch == batch):
            frames.append(nonfinite)
        calls = self._calls_to(nonfinite, caller, args, kwargs)
        outer, caller = self._first_nonfinite(batch, calls, nonfinite) or (None, caller)
        # No data loader made what a call inside the model got.
        given = [] if self._is_inside(calls) else self._arguments(args, kwargs, nonfinite.fault)
        return self._of_first(batch, frames, outer, caller, given)

    def _of_first(
        self, batch: int, frames: list[Frame], outer: Frame | None, caller: str | None, given: list[Leaf]
    ) -> Report:
        """Return the report of the first fault in the frames of the batch, which was `given` these values.

        `outer` is a call that began before the first bad one ended, so that the recorder has not counted it yet.
        """
        all_frames = frames if outer is None else with_earlier(frames, outer)
        count = self.recorder.frames_of_batch(batch)
        num_frames = None if count is None else count + len(all_frames) - len(frames)
        current = [frame for frame in all_frames if frame.batch == batch]
        written, _ = self.starts.changes()
        # A tensor that the model wrote to may have come in finite. One computed with weights is no data loader's.
        graphs = {id(x): nodes_behind([x]) for _, x in given if isinstance(x, Tensor)}
        is_weight = lambda node: isinstance(getattr(node, "variable", None), nn.Parameter)  # noqa: E731
        makers = {number: nodes[0].name() for number, nodes in graphs.items() if any(map(is_weight, nodes))}
        unknown = written | makers.keys()
        came_in = [observe(x, label, "input") for label, x in given if id(x) not in unknown]
        finding = find(current, batch_inputs=came_in, caller=caller, rank=rank(), num_frames=num_frames)
        assert finding is not None, "one of the frames has a fault"
        if finding.origin == "received" and caller is None:
            x = dict(given).get(finding.label)
            if id(x) in written and observe(x, "", "input").is_fault:
                finding = replace(finding, origin="produced", remarks=(_WRITTEN.format(finding.label),))
            else:
                finding = replace(finding, operation=makers.get(id(x)))
        finding = self._explained(finding)
        if self.describe is not None:
            remarks = self.describe(finding, culprit(finding, current)[1])
            finding = replace(finding, remarks=(*finding.remarks, *remarks))
        return self.of(all_frames, finding)

    def _explained(self, finding: Finding) -> Finding:
        """Return the finding of a weight with the operation of the step that wrote it, if an optimizer did."""
        path, _, key = f"{finding.module}.{finding.label}".removeprefix(".").rpartition(".")
        if finding.origin != "weight" or (model := self.model()) is None:
            return finding
        owner = find_module(model, path)
        weight = None if owner is None else owner.module._parameters.get(key)
        # A copy at one moment: another thread may make its first step.
        for optimizer in [x for reference, *_ in [*self.steppers.values()] if (x := reference()) is not None]:
            if weight is not None and any(x is weight for x in parameters_of(optimizer)):
                return take_apart(finding, optimizer, weight)
        return finding

    # The calls under way

    def _calls_to(self, nonfinite: Frame, caller: str | None, args: Any, kwargs: Any) -> list[LeftCall]:
        """Return the calls around the non-finite one and that itself, the innermost first.

        This thread's stack has the calls under way, except those in compiled code, and those that have ended when a
        device tells of them. The names of modules tell of the others. Of these only the outermost call of compiled code
        has arguments, `args` and `kwargs`.
        """
        calls, model = open_calls(), self.model()
        if model is None or (calls and isinstance(calls[0].module, Function)):
            return calls
        names = _recorded_names(model)
        target = nonfinite.name if nonfinite.name in names.values() else caller
        if target not in names.values() or target is None:
            return calls
        innermost = next((names[id(call.module)] for call in calls if id(call.module) in names), None)
        outermost = self.recorder.outermost() if innermost is None else innermost
        around = list[LeftCall]()
        for name, _, module in named_modules(model):
            is_around = id(module) in names and is_in(target, name) and is_in(name, outermost or "")
            if is_around and name != innermost:
                call = LeftCall(module, (), {}, ())
                around.insert(0, call._replace(args=args, kwargs=kwargs) if name == outermost else call)
        return around + calls

    def _is_inside(self, calls: Sequence[LeftCall]) -> bool:
        """Return whether code of the model makes the outermost of these calls, with no call of the model around it.

        A forward does so in another thread, in a coroutine, in a generator, or in the backward of a Function.
        """
        if (model := self.model()) is None or not calls or isinstance(calls[-1].module, Function):
            return False
        root = unwrapped(model)
        if unwrapped(calls[-1].module) is root:
            return False
        if "" in self._suspicion.called or any(frame.name == "" for frame in self.recorder.frames()):
            return True
        # A program may also call parts alone, in several threads. Then no stack holds the root.
        stacks = list(sys._current_frames().values())
        return any(unwrapped(call.module) is root for stack in stacks for call in open_calls(stack))

    def _first_nonfinite(
        self, batch: int, calls: Sequence[LeftCall], nonfinite: Frame | None = None
    ) -> tuple[Frame, str | None] | None:
        """Return the frame of the outermost of these calls that holds a non-finite value, and the name of its caller.

        Weights of modules that cannot be called belong to the module that holds them. The calls come innermost first.
        Where the call of the `nonfinite` frame was given finite values, the arguments of others are not looked at.
        """
        fault = None if nonfinite is None else nonfinite.fault
        if (model := self.model()) is None:
            return None
        with suppressing("the calls around a non-finite one could not be read"):
            names, caller = _recorded_names(model), None
            roles, settings = [part[:-1] for part in self.options.read], self.options.recorder_settings()
            for call in reversed(calls):
                name = call.module.name if isinstance(call.module, Function) else names.get(id(call.module))
                if name is None:
                    continue
                if self.options.observes(name):
                    allowed = self.excuses(name, call.module)
                    values: list[tuple[Role, str, Any]] = [*state_of(call.module)]
                    if nonfinite is None or fault is None or fault.role == "input" or name == nonfinite.name:
                        arguments = self._arguments(call.args, call.kwargs, fault)
                        values += [("input", *leaf) for leaf in arguments]
                        given = (*call.args, *call.kwargs.values())
                        values += [("output", *leaf) for leaf in leaves(call.output, "output", True, given)]
                    values = [value for value in values if value[0] in roles]
                    records = [observe(x, label, role, allowed, wanted=settings) for role, label, x in values]
                    frame = Frame(batch, name, type(call.module).__name__, tuple(records))
                    if frame.fault is not None:
                        return frame, caller
                caller = name
        return None

    def _arguments(self, args: Any, kwargs: Mapping[str, Any], fault: Record | None) -> list[Leaf]:
        """Return the leaves of a call's arguments; of those in objects only the ones like the value that was received.

        A model adds to objects: a bad value in a key-value cache may come from the batch itself.
        """
        (_, added), given = self.starts.changes(), list[Leaf]()
        records = [record for frame in self.recorder.frames() if not frame.name for record in frame.records]
        # The nan of an argument that no output had before marks missing data.
        absorbed = {x.label for x in records if x.note is not None and x.note.kind == "absorbed"}
        likeness = None if fault is None or fault.role != "input" else _likeness(fault)
        for label, value in call_leaves(args, kwargs, objects=False):
            inside = leaves(value, label, num_before=len(given))  # the value alone, unless it is an object
            for at, x in inside:
                is_given = likeness is None or x is value or _likeness(observe(x, at, "input")) == likeness
                given += [(at, x)] if is_given and id(x) not in added and at not in absorbed else []
        return given


def _recorded_names(model: nn.Module) -> dict[int, str]:
    modules = [x for x in named_modules(model) if is_recorded(x.module) and may_be_called(x.module)]
    return {id(named.module): named.name for named in modules}


def _likeness(record: Record) -> tuple[Any, ...]:
    health = record.health
    return record.shape, None if health is None else (health.num_nan, health.num_posinf, health.num_neginf)
