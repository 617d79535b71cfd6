"""`torchrun … -m nanwatch.netcheck`: can these ranks talk to each other?

And if not: which rank, in which step, and what to try.

The flow, one file a step:

    command    command.py   the options, the steps in their order, the exit status
    -> place   place.py     who this rank is, from the environment
    -> guard   guard.py     the clock over each step: ends a process that hangs, also inside a native call
    -> meeting meeting.py   the key-value store: who came, who failed first, who has ended
    -> links   links.py     a TCP connection to each neighbour, without any backend
    -> steps   steps.py     device, process group, barrier, all-reduce, point-to-point, bandwidth
    -> words   words.py     every line that is printed

Nothing of it knows a watch or a model.
"""

from __future__ import annotations

from .command import main

__all__ = ["main"]
