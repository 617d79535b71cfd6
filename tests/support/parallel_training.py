"""A training run unwatched and watched, by each rank of a job: what differs, and what the watch has seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import nanwatch
from nanwatch.report.report import Report
from support import watching
from support.collectives import Counted, counting

Parallelize = Callable[[nn.Module], nn.Module]


def data(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 8, generator=generator)


def same_data(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def start_watch(model: nn.Module, **options: Any) -> nanwatch.Watch:
    return watching.watch(model, max_frames=10_000, on_nonfinite="record", verify_hits=True, **options)


def local(x: Any) -> Tensor:
    return (x.to_local() if hasattr(x, "to_local") else x).detach().clone()


def bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def equal_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(
        a[name].shape == b[name].shape and torch.equal(bits(a[name]), bits(b[name])) for name in a
    )


class Trained(NamedTuple):
    """The weights and buffers at the end, what was sent, and the watch, if there was one."""

    weights: dict[str, Tensor]
    counted: Counted
    watch: nanwatch.Watch | None


def train(model: nn.Module, step: Callable[[int], object], watch: nanwatch.Watch | None) -> Trained:
    """Three steps, of which `step` makes the forward and the backward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with counting() as counted:
        for number in range(3):
            step(number)
            optimizer.step()
            optimizer.zero_grad()
    if watch is not None:
        watch.stop()
    kept = {name: local(x) for name, x in (*model.named_parameters(), *model.named_buffers())}
    return Trained(kept, counted, watch)


def difference(plain: Trained, watched: Trained) -> dict[str, Any]:
    """Return the differences to the unwatched training, and facts from the watch."""
    watch = watched.watch
    assert watch is not None
    report = watch.report()
    then, now = plain.counted, watched.counted
    records = [r for f in report.frames for r in f.records]
    return {
        "equal": equal_bits(plain.weights, watched.weights),
        "more": [b - a for a, b in zip(then.collectives, now.collectives, strict=True)],
        "same events": now.events == then.events,
        "batches": watch.batch,
        "stale": watch.counters.get("stale_hits", 0),
        "finding": report.finding is not None,
        "names": sorted({f.name for f in report.frames}),
        "backward names": sorted({f.name for f in report.frames if f.phase == "backward"}),
        "notes": sorted({str(r.note or "") for r in records}),
        "read": sorted({r.isfinite for r in records if r.role == "output"}, key=str),
        "roles of shards": sorted({r.role for r in records if r.is_shard}),
        "mesh": report.mesh,
        "rank": report.rank,
        "same report": Report.from_json(report.to_json()) == report,
    }


def compare(
    build: Callable[[], nn.Module], parallelize: Parallelize, give: Callable[[int], Tensor] = data
) -> dict[str, Any]:
    """Watched before and after the model is made parallel, with gradients and without.

    Beside gradients replicas are compared.
    """

    def run(when: str, **options: Any) -> Trained:
        torch.manual_seed(0)
        model = build()
        watch = start_watch(model, **options) if when == "before" else None
        model = parallelize(model)
        if when == "after":
            watch = start_watch(model, **options)
        return train(model, lambda number: model(give(number)).square().sum().backward(), watch)

    plain = run("never")
    seen: dict[str, Any] = {
        "collectives": sum(plain.counted.collectives),
        "events": dict(plain.counted.events),
    }
    for when in ("before", "after"):
        for gradients in (False, True):
            seen[f"{when}, gradients={gradients}"] = difference(
                plain, run(when, gradients=gradients, replicas=gradients)
            )
    return seen
