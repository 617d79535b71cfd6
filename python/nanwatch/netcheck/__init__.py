"""`torchrun … -m nanwatch.netcheck`: can these ranks talk to each other, and if not, which rank, where and why?

`command` runs the steps in their order: `guard` is the clock over each, `meeting` the store of the ranks, `steps` the
checks, `words` the printed lines. Nothing here knows a watch or a model.
"""

from __future__ import annotations

from .command import main

__all__ = ["main"]
