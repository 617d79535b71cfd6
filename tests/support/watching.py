"""`watch` with the settings that a user gives as an option's argument, in the environment, or not at all."""

from dataclasses import replace
from typing import Any
from unittest import mock

from torch import nn

from nanwatch.session.api import OPTIONS, Options, make_options, start_watch
from nanwatch.session.watch import Watch
from nanwatch.sinks.sink import Sink
from nanwatch.sinks.targets import sink_for

_SETTINGS = {name for name in Options.__dataclass_fields__ if name not in OPTIONS}
_RECORDER = ("verify_hits", "counts", "fingerprints", "sketches")


def watch(model: nn.Module, *, log_every: int | None = None, **options: Any) -> Watch:
    """Start to watch: `act_at` and so on are fields of Options, `counts` and so on are the recorder's.

    `log_every` is the `every` of the sinks.
    """
    settings = {name: options.pop(name) for name in _SETTINGS & options.keys()}
    recorder = {name: options.pop(name) for name in _RECORDER if name in options}
    if log_every is not None:
        given = options["sinks"] if isinstance(options["sinks"], list) else [options["sinks"]]
        options["sinks"] = [target if isinstance(target, Sink) else sink_for(target) for target in given]
        for sink in options["sinks"]:
            sink.every = log_every
    made = Options.recorder_settings
    with mock.patch.object(Options, "recorder_settings", lambda *args: replace(made(*args), **recorder)):
        return start_watch(model, make_options(options, **settings))
