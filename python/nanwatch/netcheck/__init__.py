"""`torchrun … -m nanwatch.netcheck`: can these ranks talk to each other, and if not, which rank, where and why?

`command` runs the checks of `steps` in order and prints. `guard` limits the time of each step. The ranks exchange
results through the store of `meeting`. Nothing here knows a watch or a model.
"""

from __future__ import annotations

from .command import main

__all__ = ["main"]
