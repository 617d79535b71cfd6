"""Agreement of a Watch with the other ranks of the job: what is published, and how long a verdict holds.

With "raise" each failure has a verdict. With a function the run goes on, so failures in a row share one: those that
follow on this rank or on another are a consequence of the first.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..distributed.consensus import PeerNonFiniteError
from ..distributed.coordinator import RankCoordinator
from ..report.finding import Finding, Origin
from ..report.report import Report
from ..util.visible import warn_user
from .options import Options
from .reports import is_due


class RankAgreement:
    """Agreement of one Watch with the other ranks, if `on_nonfinite` is "raise" or a function.

    `last_frames` is that of RankCoordinator. `is_active`: the ends of batches matter.
    """

    def __init__(
        self, model: nn.Module | None, options: Options, last_frames: Callable[[str], Report]
    ) -> None:
        self._raises = options.on_nonfinite == "raise"
        self._peer_timeout = options.peer_timeout
        self._coordinator: RankCoordinator | None = None
        # On the present run of non-finite batches, which may have begun on another rank.
        self._verdict: Origin | None = None
        self._num_published = 0
        acts = self._raises or callable(options.on_nonfinite)
        if model is not None and acts and options.peer_timeout and options.enabled:
            self._coordinator = RankCoordinator(
                model, options.peer_timeout, last_frames, goes_on=not self._raises
            )

    @property
    def is_active(self) -> bool:
        """True while this rank takes part."""
        return self._coordinator is not None

    def batch_started(self, batch: int) -> None:
        """Join the others. Raises PeerNonFiniteError when another rank has failed, unless the run goes on."""
        if self._coordinator is not None:
            self._take(self._coordinator.batch_started(batch))

    def check(self) -> None:
        """Ask for a failure of another rank. Raises PeerNonFiniteError as `batch_started` does."""
        if self._coordinator is not None:
            self._take(self._coordinator.check())

    def explain(self, error: BaseException | None) -> PeerNonFiniteError | None:
        """Return the other rank's failure behind an error of a collective; see RankCoordinator."""
        return None if self._coordinator is None else self._coordinator.explain(error)

    def publish(self, finding: Finding, *, is_first: bool) -> None:
        """Publish this rank's failure, which `is_first` of several in a row, before anything slow.

        Where the run goes on, publish only the first, and after many of them as rarely as they are run again.
        """
        if self._coordinator is None:
            return
        if not self._raises:
            if not is_first or self._verdict is not None:
                return
            self._num_published += 1
            if not is_due(self._num_published):
                return
        self._coordinator.publish(finding)

    def settle(self, finding: Finding | None) -> Origin | None:
        """Return the verdict on this failure or on the run of failures it belongs to; None without one."""
        if self._coordinator is not None:
            origin = self._coordinator.settle(finding)
            if self._raises or origin is not None:
                self._keep(origin)
        return self._verdict

    def end_run(self) -> None:
        """Let go of the verdict: a finite batch has ended."""
        self._verdict = None

    def close(self) -> None:
        """Leave the other ranks."""
        if self._coordinator is not None:
            self._coordinator.close()

    def _take(self, error: PeerNonFiniteError | None) -> None:
        if error is None:
            return
        if self._raises:
            raise error
        self._keep(error.origin)

    def _keep(self, origin: Origin | None) -> None:
        self._verdict = origin
        if self._raises or origin is None or origin.is_complete or self._coordinator is None:
            return
        # A rank that does not answer, as one that has ended, would hold up a run that goes on at each failure.
        self._coordinator.close()
        self._coordinator = None
        warn_user(
            "nanwatch: this rank agrees with the others no more, because not all of them answered within"
            f" peer_timeout={self._peer_timeout:g} s: {origin}",
            may_raise=False,
        )
