"""`torchrun … -m nanwatch.netcheck`: can these ranks talk to each other, and if not, which rank, where and why?

`command` runs the checks of `steps` in order. `guard` limits the time of each, `meeting` is the store through which the
ranks exchange results, and `words` prints. Nothing here knows a watch or a model.
"""

from __future__ import annotations

from .command import main

__all__ = ["main"]
