"""Decision of several ranks to do something that only all of them can do, without a collective that could hang."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING

from ..util.job import store_key
from .consensus import default_store

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_POLL = 0.02  # seconds
_calls: Counter[str] = Counter()


def all_join(name: str, num_ranks: int, timeout: float, store: Store | None = None) -> bool:
    """Return whether so many ranks call this, with this name, within `timeout` seconds; the same on each of them.

    Each of them calls it equally often. `store` is the job's by default.
    """
    store = default_store() if store is None else store
    _calls[name] += 1
    place = f"nanwatch/joint/{store_key(os.environ)}/{name}/{_calls[name]}"
    verdict = f"{place}/verdict"
    deadline = time.monotonic() + timeout
    if store.add(f"{place}/arrived", 1) == num_ranks:
        store.compare_set(verdict, "", "all")
    while not store.check([verdict]):
        if time.monotonic() > deadline:
            store.compare_set(verdict, "", "some")
            break
        time.sleep(_POLL)
    return bool(store.get(verdict) == b"all")
