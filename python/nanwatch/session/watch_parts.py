"""Parts of a Watch that an option switches on and that follow its batches: replicas, recheck, updates."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..diagnosis.recheck import Recheck
from ..distributed.replica_watch import ReplicaWatch
from ..monitoring.sinks import SinkStream
from ..monitoring.updates.audit import UpdateAudit
from ..recording.events import Event, Recorder, WatchPart
from .options import PEER_TIMEOUT, Options


def optional_parts(
    model: nn.Module, options: Options, recorder: Recorder, sinks: SinkStream
) -> Iterator[WatchPart]:
    """Yield the parts that the options ask for. The EventDispatch calls each, and the Watch removes it."""
    if not options.enabled:
        return
    if options.replicas:
        recorder.subscribe(Event.BATCH_START | (Event.FRAME if options.fingerprints else 0))
        timeout = options.peer_timeout or PEER_TIMEOUT
        yield ReplicaWatch(model, options.replicas, timeout, options.output_dir, sinks.on_replica_difference)
    if options.recheck:
        recorder.subscribe(Event.BATCH_START)
        yield Recheck(model, options.recheck, sinks.on_hardware_suspect)
    if options.updates:
        yield UpdateAudit(model, recorder, options.updates, sinks.on_update, options.is_frozen)
