"""Programs that keep state, fail once and go on: watched they have to end as they end unwatched."""

from . import forwards, losses  # noqa: F401 - enter their programs
