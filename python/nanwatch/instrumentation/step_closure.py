"""The closure of an optimizer's step.

Lightning makes forward and backward in one, also for optimizers that call it once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer


def with_check_after_closure(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], check: Callable[[], object]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of the step, with `check` after its closure; None for a step without a closure."""
    if len(args) < 2 and not kwargs:
        return None
    names = list(inspect.signature(type(optimizer).step).parameters)
    place = names.index("closure") if "closure" in names else len(args)
    closure = args[place] if place < len(args) else kwargs.get("closure")
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def checked(*own: Any, **named: Any) -> Any:
        loss = closure(*own, **named)
        check()
        return loss

    if place < len(args):
        return (*args[:place], checked, *args[place + 1 :]), kwargs
    return args, {**kwargs, "closure": checked}
