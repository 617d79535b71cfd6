"""`torchrun … -m nanwatch.netcheck`: can these ranks talk to each other, and if not, which rank, where and why?

`command` runs the checks of `steps` in order and prints. `meeting` has the store through which the ranks exchange
results, and the clock that limits the time of each step. Nothing here knows a watch or a model.
"""

from __future__ import annotations

from .command import main

__all__ = ["main"]
