"""Counter of all that torch's CPU allocator hands out, operators' own working memory included."""

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def allocated(step: Callable[[], object]) -> tuple[int, int]:
    """The most bytes that were allocated at once in `step()`, and those left after it, both beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = [(raw.start_ns(), raw.nbytes()) for raw in results.events() if raw.name() == "[memory]"]
    # In the order of time, those of one nanosecond as they came: a block is freed after it was made.
    events.sort(key=lambda event: event[0])
    in_use = list(accumulate((size for _, size in events), initial=0))
    return max(in_use), in_use[-1]
