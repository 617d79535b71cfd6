"""Every way out of a watched call: the user's exception, the listener's, Ctrl-C."""

from __future__ import annotations

import gc
import sys
import weakref
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from nanwatch import watch
from nanwatch.instrumentation.calls import _watched_call
from nanwatch.instrumentation.slot import attach
from nanwatch.recording.events import Event, Settings
from nanwatch.recording.recorder import make_recorder


class Talker:
    """RecorderEvents that notes what it is told, and raises where it is asked to."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.raises: dict[str, BaseException] = {}
        self.seen: BaseException | None = None  # in on_batch_end, as being raised

    def __getattr__(self, method: str) -> Any:
        if not method.startswith("on_"):
            raise AttributeError(method)
        return partial(self._note, method)

    def _note(self, method: str, subject: Any, *more: Any) -> object:
        is_end = method == "on_batch_end"
        self.told.append((method, getattr(subject, "name", subject), *(more if is_end else ())))
        self.seen = sys.exc_info()[1] if is_end else self.seen
        if method in self.raises:
            raise self.raises[method]
        return Held()


class Held:
    """Values that a listener may give a recorder to hold."""

    alive: ClassVar[weakref.WeakSet[Held]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)


class Part(nn.Module):
    """Doubles its input, or raises."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return 2 * x


class Stand:
    """A model, a recorder on it, and the listener."""

    def __init__(self, **settings: Any) -> None:
        self.listener = Talker()
        self.recorder = make_recorder(Settings(**settings), self.listener)
        self.recorder.subscribe(Event.BATCH_START | Event.BATCH_END | Event.FRAME)
        self.part = Part()
        self.model = nn.Sequential(self.part, nn.Identity())
        for name, module in (("", self.model), ("0", self.part)):
            self.model_node = self.recorder.add_node(name, module, True, False)
            attach(module, _watched_call(self.recorder, module, None, self.model_node))

    def outcome(self, x: Tensor) -> BaseException | None:
        """Return the exception that a call of the model raises."""
        try:
            self.model(x)
        except BaseException as error:
            return error
        return None

    def assert_as_ever(self) -> None:
        """The next batch is a batch like any other, and nothing of the one before is kept."""
        self.part.error = None
        self.listener.raises.clear()
        self.listener.told.clear()
        batch = self.recorder.latest_batch + 1
        assert sys.exc_info() == (None, None, None)
        assert self.outcome(torch.ones(2)) is None
        frames = [("on_frame", "0"), ("on_frame", "")]
        assert self.listener.told == [("on_batch_start", batch), *frames, ("on_batch_end", batch, True)]
        assert self.listener.seen is None


@pytest.mark.parametrize("error", [ValueError("user's"), KeyboardInterrupt(), StopIteration(4)], ids=repr)
@pytest.mark.usefixtures("each_recorder")
def test_a_forwards_exception_comes_out_as_it_is(error: BaseException) -> None:
    """The same object, with no cause, no context and no argument of the call kept; the listener sees it raised."""
    stand = Stand()
    stand.part.error = error
    x = torch.ones(2)
    try:
        raise LookupError("being handled")
    except LookupError:
        assert stand.outcome(x) is error
        handled = sys.exc_info()[0]
    assert handled is LookupError
    assert error.__cause__ is None
    assert isinstance(error.__context__, LookupError)  # as Python sets it where one is being handled
    assert stand.listener.seen is error
    assert stand.listener.told == [("on_batch_start", 0), ("on_batch_end", 0, False)]
    error.__traceback__ = error.__context__ = stand.listener.seen = None
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    stand.assert_as_ever()


@pytest.mark.parametrize("method", ["on_batch_start", "on_frame", "on_nonfinite", "on_batch_end"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.usefixtures("each_recorder")
def test_what_the_listener_raises_the_call_raises(method: str, kind: type[BaseException]) -> None:
    """At each point; the batch is closed, the object that the recorder held is let go, and nothing is kept."""
    stand = Stand()
    stand.listener.raises[method] = kind("listener's")
    x = torch.tensor([1.0, float("nan")])
    error = stand.outcome(x)
    assert error is stand.listener.raises[method]
    error.__traceback__ = None
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    assert not Held.alive
    stand.assert_as_ever()


@pytest.mark.usefixtures("each_recorder")
def test_ctrl_c_in_a_backward_ends_it() -> None:
    """KeyboardInterrupt out of our own Python code reaches the user."""
    model = nn.Linear(2, 2)
    with watch(model, gradients=True, rerun=False) as w:
        starts = w._recorder.subscribe(Event.BACKWARD_START)
        place = "nanwatch.session.watch.EventDispatch.on_backward_start"
        with mock.patch(place, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            model(torch.ones(2)).sum().backward()
        model(torch.ones(2)).sum().backward()
        starts.remove()
        assert [frame.phase for frame in w.frames][-1] == "backward"
