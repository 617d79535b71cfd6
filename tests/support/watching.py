"""`watch` with the settings that a user gives as an option's argument, in the environment, or not at all."""

from __future__ import annotations

from typing import Any

from torch import nn

from nanwatch.session.api import start_watch
from nanwatch.session.options import OPTIONS, Options, make_options
from nanwatch.session.watch import Watch

_SETTINGS = {name for name in Options.__dataclass_fields__ if name not in OPTIONS}
_RECORDER = ("measure_time", "verify_hits", "counts", "fingerprints", "statistics", "sketches")


def watch(model: nn.Module, **options: Any) -> Watch:
    """Start to watch: `act_at` and so on are fields of Options, `counts` and so on are the recorder's."""
    settings = {name: options.pop(name) for name in _SETTINGS & options.keys()}
    recorder = {name: options.pop(name) for name in _RECORDER if name in options}
    return start_watch(model, make_options(options, **settings), **recorder)
