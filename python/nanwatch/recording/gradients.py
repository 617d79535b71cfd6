"""Gradients of the inputs, outputs and weights of watched modules, without the compiled part.

csrc/gradients/gradient_log.cpp does the same and says how. Tests hold the one against the other. A recorded call leaves
a hook on each of its tensors. Hooks refer to the call, and only weakly to this module's object: they live and die with
the graph. A leaf outlives graphs and has one hook for all calls.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from ..records.record import Record
from ..util.job import rank_and_world_size
from .events import Arrival, Part
from .observe import Observe, past_torch_function

_KEPT = 16  # the latest of one backward; see csrc/gradients/recent_gradients.h


class _GradientState(NamedTuple):
    """Identity of a gradient: which tensor, in which version, over which memory; None where nothing tells."""

    tensor: int
    version: int | None
    memory: tuple[Any, ...] | None

    @property
    def is_lasting(self) -> bool:
        """Return whether an equal state means equal content while tensor and memory are still the same."""
        return self.version is not None and self.memory is not None


def _state_of(x: Tensor) -> _GradientState:
    """Return the state of a gradient, without memory for subclasses and layouts that change in ways of their own."""
    version = None if x.is_inference() else x._version
    is_plain = (
        type(x) is Tensor
        and x.layout is torch.strided
        and x.device.type in ("cpu", "cuda")
        and not (x.is_nested or x.is_quantized or x._is_zerotensor())
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )
    memory = None
    if is_plain:
        storage = x.untyped_storage()._cdata
        memory = (storage, x.storage_offset(), x.dtype, tuple(x.shape), x.stride())
    return _GradientState(x._cdata, version, memory)


class _RecentGradients:
    """The latest gradients of one backward, for those that come once more.

    Weak references say that neither the tensor nor its storage has a new owner of its address.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[_GradientState, Record, object]] = deque(maxlen=_KEPT)

    def find(self, state: _GradientState) -> Record | None:
        """Return the row that a gradient in this state was kept with, or None."""
        if not state.is_lasting:
            return None
        return next((row for kept, row, _ in self._kept if kept == state), None)

    def keep(self, x: Tensor, state: _GradientState, row: Record) -> None:
        """Keep the row of a gradient whose state is lasting."""
        held = torch._C._WeakTensorRef(x), StorageWeakRef(x.untyped_storage())  # type: ignore[attr-defined]
        self._kept.append((state, row, held))

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()


@dataclass(eq=False)
class _Call:
    batch: int
    number: int
    name: str
    class_name: str
    caller: str | None
    recomputed: bool
    start: object  # of the batch, kept alive
    backward: int = -1  # the one that last brought a gradient of its outputs


@dataclass(slots=True)
class _Backward:
    """The gradients that came in one run of the autograd engine."""

    arrivals: list[tuple[_Call, Part, int, Record]] = field(default_factory=list)
    times: int = 0
    # Place, state and row of the latest gradient: the users of a place come one directly after the other.
    latest: tuple[tuple[Any, ...], _GradientState, Record] | None = None
    recent: _RecentGradients = field(default_factory=_RecentGradients)
    is_nonfinite: bool = False
    is_over: bool = False
    # No other process in the job: collectives write past the version counter.
    is_alone: bool = field(default_factory=lambda: rank_and_world_size()[1] == 1)

    def came(self, place: tuple[Any, ...], state: _GradientState) -> bool:
        """Return whether the latest gradient was this one, at this very place."""
        return self.latest is not None and self.latest[:2] == (place, state)

    def find(self, place: tuple[Any, ...], state: _GradientState) -> Record | None:
        """Return the row of a gradient that comes now, None where it has to be read."""
        if state.version is None:
            return None
        if self.latest is not None and self.came(place, state):
            return self.latest[2]
        return self.recent.find(state) if self.is_alone else None


class PythonGradients:
    """Follows the tensors of recorded calls into their backward.

    `started()` is called at the first gradient of a backward; `keep(calls, rows, arrivals, is_nonfinite)` when it is
    over, with a list of rows for each call. What these raise, the backward raises. `lock` is the recorder's: backwards
    of several threads, and of several devices, meet here.
    """

    def __init__(
        self,
        started: Callable[[], None],
        keep: Callable[..., None],
        observe: Observe,
        lock: AbstractContextManager[object],
    ) -> None:
        self.tensors_read = 0
        self._started = started
        self._keep = keep
        self._observe = observe
        self._lock = lock
        self._backwards: dict[int, _Backward] = {}
        self._calls = 0

    def follow(
        self,
        tensors: Sequence[tuple[Part, str, Tensor]],
        call: tuple[int, str, str, str | None, bool],
        start: object,
        *,
        in_compiled_code: bool = False,
    ) -> object:
        """Leave hooks for the gradients of the tensors of a call, each with its part and label.

        `call` is its batch, name, class and caller, and whether it was recomputed. The hooks keep `start`. Returns
        what has to live as long as weights used in compiled code are to be followed, where nothing else of the call can
        be.
        """
        tensors = [one for one in tensors if _has_gradient(one[2])]
        has_graph = any(part == "output" and not x.is_leaf for part, _, x in tensors)
        if not (has_graph or in_compiled_code) or torch._C._get_tracing_state() is not None:
            return None
        batch, name, class_name, caller, recomputed = call
        # Where nothing but weights is followed, no graph shows when their gradients can come no more.
        start = start if has_graph else None
        with self._lock:
            made = _Call(batch, self._calls, name, class_name, caller, recomputed, start)
            self._calls += 1
        outputs = [x for part, _, x in tensors if part == "output"]
        for part, label, x in tensors:
            if not has_graph and (part != "weight" or not x.is_leaf):
                continue
            # A tensor that the module writes into is its output afterwards.
            if part == "input" and not x.is_leaf and any(_same(x, one) for one in outputs):
                continue
            if part == "output" and x.is_leaf:
                continue  # handed through
            if x.grad_fn is None:
                with self._lock:
                    self._leaf_hook(x).users.append((weakref.ref(made), part, f"{label}.grad"))
            else:
                place = (x.grad_fn._sequence_nr(), x.output_nr)
                x.register_hook(_TensorHook(weakref.ref(self), place, made, part, f"{label}.grad"))
        return made if not has_graph else None

    def arrived(
        self, gradient: Tensor, place: tuple[Any, ...], users: Sequence[tuple[_Call, Part, str]]
    ) -> None:
        """Take a gradient that came at this place of the graph."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        backward = self._open(task)
        state = _state_of(gradient)
        with self._lock:
            backward.times += not backward.came(place, state)
            time = backward.times
            known = backward.find(place, state)
            self.tensors_read += known is None
        row = known or self._observe(gradient, "", "gradient", batch=users[0][0].batch)
        with self._lock:
            backward.latest = (place, state, row)
            backward.is_nonfinite = backward.is_nonfinite or row.is_fault
            for call, part, label in users:
                if part == "output":
                    call.backward = task
                backward.arrivals.append((call, part, time, row._replace(label=label)))
            # A leaf's gradient comes to another place only by chance.
            if known is None and row.isfinite and state.is_lasting and place[0] != "leaf":
                backward.recent.keep(gradient, state, row)

    def finish_broken(self) -> None:
        """Make frames of the backwards that ended by an exception."""
        with self._lock:
            over = [task for task, one in self._backwards.items() if one.is_over]
        for task in over:
            self._finish(task)

    def finish_nonfinite(self) -> None:
        """Make frames of the backward under way, as far as it has come, if a gradient in it is not finite."""
        task = torch._C._current_graph_task_id()
        backward = self._backwards.get(task)
        if backward is not None and backward.is_nonfinite:
            self._finish(task)

    @past_torch_function()
    def release(self, leaves: Iterable[Tensor]) -> None:
        """Remove the hooks from these leaves."""
        for x in leaves:
            hooks = x._backward_hooks or {}
            for key in [key for key, hook in list(hooks.items()) if _is_of(hook, self)]:
                del hooks[key]

    def _leaf_hook(self, x: Tensor) -> _LeafHook:
        hooks = x._backward_hooks or {}
        found: Any = next((hook for hook in list(hooks.values()) if _is_of(hook, self)), None)
        if found is None:
            found = _LeafHook(weakref.ref(self))
            x.register_hook(found)
        hook: _LeafHook = found
        hook.users = [user for user in hook.users if user[0]() is not None]
        return hook

    def _open(self, task: int) -> _Backward:
        with self._lock:
            found = self._backwards.get(task)
            if found is not None:
                return found
            backward = self._backwards[task] = _Backward()
        this = weakref.ref(self)

        def over() -> None:
            if (gradients := this()) is not None:
                gradients._finish(task)

        def gone() -> None:
            # Without the lock: the garbage collector may run this anywhere.
            if (gradients := this()) is not None and (own := gradients._backwards.get(task)) is not None:
                own.is_over = True
                own.recent.clear()

        # The engine drops it with all else when an exception ends the run.
        weakref.finalize(over, gone).atexit = False
        torch.autograd.Variable._execution_engine.queue_callback(over)
        self._started()
        return backward

    def _finish(self, task: int) -> None:
        with self._lock:
            backward = self._backwards.pop(task, None)
        if backward is None:
            return
        backward.recent.clear()
        calls = _in_order([call for call, *_ in backward.arrivals])
        position = {id(call): i for i, call in enumerate(calls)}
        rows: list[list[Record]] = [[] for _ in calls]
        arrivals = []
        for call, part, time, row in backward.arrivals:
            own = rows[position[id(call)]]
            arrivals.append(Arrival(position[id(call)], len(own), part, time))
            own.append(row)
        self._keep(calls, rows, arrivals, backward.is_nonfinite)


@dataclass(slots=True, eq=False)
class _TensorHook:
    gradients: weakref.ref[PythonGradients]
    place: tuple[int, int]
    call: _Call
    part: Part
    label: str

    @past_torch_function()
    def __call__(self, gradient: Tensor | None) -> None:
        # Results of an operation that nobody used get None, as all parts of unbind but the used one.
        if gradient is None or is_compiling():
            return  # compiled autograd follows hooks, and this leads nowhere that it could
        # An argument of a call may get its gradient from elsewhere, too: the call itself has no part in this backward.
        has_part = self.part != "input" or self.call.backward == torch._C._current_graph_task_id()
        if has_part and (gradients := self.gradients()) is not None:
            gradients.arrived(gradient, self.place, [(self.call, self.part, self.label)])


@dataclass(slots=True, eq=False)
class _LeafHook:
    gradients: weakref.ref[PythonGradients]
    users: list[tuple[weakref.ref[_Call], Part, str]] = field(default_factory=list)

    @past_torch_function()
    def __call__(self, gradient: Tensor | None) -> None:
        # None comes from a Function whose backward gives none.
        if gradient is None or is_compiling() or (gradients := self.gradients()) is None:
            return
        task = torch._C._current_graph_task_id()
        known = list(self.users)  # whatever other threads add
        alive = [(call, part, label) for one, part, label in known if (call := one()) is not None]
        users: dict[object, tuple[_Call, Part, str]] = {}
        for user in alive:
            if user[1] == "output" or user[0].backward == task:
                # A module may use a weight in several calls. The gradient is the sum over them, and belongs to the
                # first call, which the backward reaches last.
                users.setdefault((user[0].name, user[2]) if user[1] == "weight" else id(user), user)
        # A weight that is used past its module's call, or in compiled code: its latest call there was.
        found = list(users.values()) or [user for user in alive if user[1] == "weight"][-1:]
        if found:
            gradients.arrived(gradient, ("leaf", id(self)), found)

    def __deepcopy__(self, memo: object) -> _LeafHook:
        """Return a hook that does nothing: a copy of the leaf is not followed."""
        return _LeafHook(lambda: None)  # type: ignore[arg-type]


def _in_order(calls: Sequence[_Call]) -> list[_Call]:
    """Return each call once, ordered by when it was done: when it and all calls in it had their last gradient.

    `calls` has one entry for each gradient. A parent comes after its children, as in the forward.
    """
    done = {call: i for i, call in enumerate(calls)}
    of_children: dict[str | None, int] = {}  # by the module that made them, until its own call is met
    for call in sorted(done, key=lambda one: one.number):
        done[call] = max(done[call], of_children.pop(call.name, 0))
        of_children[call.caller] = max(done[call], of_children.get(call.caller, 0))
    return sorted(done, key=lambda one: (done[one], one.number))


def _is_of(hook: object, gradients: PythonGradients) -> bool:
    return isinstance(hook, _LeafHook) and hook.gradients() is gradients


def _same(x: Tensor, other: Tensor) -> bool:
    if x is other:
        return True
    return x.grad_fn is not None and x.grad_fn is other.grad_fn and x.output_nr == other.output_nr


def _has_gradient(x: Tensor) -> bool:
    """Return whether hooks on this tensor would ever see a gradient of numbers."""
    if not x.requires_grad or x.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    try:
        return x.grad_fn is not None or x.is_leaf
    except RuntimeError:
        # One of several views, as unbind gives them, after their base was written into: it has no graph any more, and
        # autograd refuses each use of it.
        return False
