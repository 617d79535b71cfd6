"""What a watch does about a failure: tell the other ranks, look closer, call the user or raise."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from ..distributed.coordinator import RankCoordinator
from ..report import text
from ..report.errors import NonFiniteError, add_note
from ..report.report import Report
from ..util.suppressed import suppressed
from ..util.user_warning import warn_user
from .closer_look import CloserLook
from .options import Options

Look = Callable[[Report], Report]


class Response:
    """As `on_nonfinite` says. `last_frames()` gives the latest frames as a report without a finding.

    `look` is, in what follows, how its caller looks closer at a report; see `look_closer`.
    """

    def __init__(self, model: nn.Module, options: Options, last_frames: Callable[[], Report]) -> None:
        self._action = options.on_nonfinite
        self._closer_look = CloserLook(model, options)
        self._peers: RankCoordinator | None = None
        if self._action == "raise" and options.peer_timeout and options.enabled:
            # Not a bound method: the job would keep this alive.
            closer_look = self._closer_look

            def write(name: str) -> Report:
                report = last_frames()
                closer_look.write_frames(report, name)
                return report

            self._peers = RankCoordinator(model, options.peer_timeout, write)
        # What was raised inside a forward: it is looked at more closely once the forward has been left, and with it
        # any lock that it holds.
        self._raised: dict[int, NonFiniteError] = {}

    @property
    def acts(self) -> bool:
        """Whether a report is handed to anybody; otherwise the run goes on by itself."""
        return self._action == "raise" or callable(self._action)

    @property
    def awaits_batches(self) -> bool:
        """Whether it wants to be told of the starts and ends of batches."""
        return self._closer_look.keeps_start or self._peers is not None

    def batch_started(
        self, batch: int, module: nn.Module | None, args: tuple[Any, ...], kwargs: Any
    ) -> object:
        """Keep what a second run would need. Raises PeerNonFiniteError when another rank has failed.

        Return what the recorder is to hold; see CloserLook.
        """
        if self._peers is not None:
            self._peers.batch_started(batch)
        if not self._closer_look.keeps_start or module is None:
            return None
        return self._closer_look.batch_started(module, args, kwargs)

    def batch_left(self, completed: bool, look: Look) -> None:
        """This thread's forward has returned (`completed`) or raised: complete what was raised inside of it.

        Raises PeerNonFiniteError from an error of a collective, when that is what came of another rank's failure.
        """
        raised = self._raised.pop(threading.get_ident(), None)
        if completed:
            return
        if raised is not None:
            raised.report = look(raised.report)
            if self._peers is not None:
                raised.origin = self._peers.settle(raised.report.finding)
        else:
            self.explain(sys.exc_info()[1])

    def batch_ended(self, batch: int) -> None:
        """Let go of what was kept, unless the batch's backward is to come."""
        self._closer_look.batch_ended(batch)

    def backward_failed(self, batch: int) -> None:
        """Keep what a second run of the batch would need until a step has been looked at."""
        self._closer_look.backward_failed(batch)

    def let_go(self) -> None:
        """Let go of what was kept for the backward."""
        self._closer_look.let_go()

    def announce(self, report: Report) -> None:
        """Tell the other ranks, before anything slow."""
        if self._peers is not None and report.finding is not None:
            self._peers.publish(report.finding)

    def look_closer(self, report: Report, *, is_late: bool) -> Report:
        """The report with what a second run shows; `is_late` is for a batch that this thread has left behind."""
        return self._closer_look.at(report, is_late=is_late)

    def act(self, report: Report, look: Look, *, inside: bool = False) -> None:
        """Hand the report to the user's function, or raise it; `inside` a forward, as it is, until `batch_left`."""
        if callable(self._action):
            self._action(look(report))
        elif self._action == "raise":
            if inside:
                here = threading.get_ident()
                self._raised[here] = NonFiniteError(report)
                # Through no local: the traceback would hold itself, and with it the locals of the forward.
                raise self._raised[here]
            closer = look(report)
            raise NonFiniteError(closer, None if self._peers is None else self._peers.settle(closer.finding))

    def note(self, error: Exception, report: Report, look: Look) -> None:
        """Say in a note of somebody else's exception, which ends a batch, what was not finite in it.

        Also hand the report to the user's function, whose errors the caller drops in favour of `error`.
        """
        closer = look(report) if self.acts else report
        add_note(error, closer)
        if callable(self._action):
            self._action(closer)

    def tell_at_end(self, report: Report, look: Look) -> None:
        """Tell of gradients that are not finite when the watch ends, and that no step was about to take.

        They are no failure yet, so this warns where another failure would be raised.
        """
        is_raising = sys.exc_info()[0] is not None
        closer = look(report)
        if self._action in ("raise", "warn") and closer.finding is not None:
            warn_user(
                f"{text.summary(closer.finding)}; the watch ended before a step took it; Watch.report() has the frames"
                " that led to it",
                may_raise=not is_raising,
            )
        elif callable(self._action):
            try:
                self._action(closer)
            except Exception:
                if not is_raising:
                    raise
                suppressed("on_nonfinite raised while the watch ended by another error")

    def explain(self, error: BaseException | None) -> None:
        """Raises PeerNonFiniteError from `error` when another rank's failure is behind it."""
        explained = None if self._peers is None else self._peers.explain(error)
        if explained is not None:
            raise explained from error

    def run_ended(self) -> None:
        """Raises PeerNonFiniteError when another rank has failed, as far as this one knows."""
        if self._peers is not None:
            self._peers.check()

    def close(self) -> None:
        """Keep nothing, and hear of other ranks no more."""
        self._closer_look.let_go()
        if self._peers is not None:
            self._peers.close()
