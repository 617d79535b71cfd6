"""Exceptions that nanwatch suppresses so that the user's run goes on: counted by reason, and logged.

    logging.getLogger("nanwatch").setLevel(logging.DEBUG)

shows each with its traceback. `counts` has the number of each in this process.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

counts: Counter[str] = Counter()

_log = logging.getLogger("nanwatch")


def suppressed(reason: str) -> None:
    """Count the exception that is being handled under `reason`, and log it at debug level. Never raises."""
    counts[reason] += 1
    try:
        _log.debug("suppressed %s: %s", type(sys.exc_info()[1]).__name__, reason, exc_info=True)
    except Exception:  # a handler or a filter of the user's; there is nobody left to tell
        counts["the log refused a line"] += 1


@contextmanager
def suppressing(reason: str) -> Iterator[None]:
    """Suppress every Exception of the block, as `contextlib.suppress(Exception)` does, and count it."""
    try:
        yield
    except Exception:
        suppressed(reason)
