"""The oracle: does a faulty form have the effect that its case claims, and have the healthy forms not?

Independent of every tool: it compares the states that `tools/oracle.py` keeps. A case's `effect` has one of

- still: these tensors never change in the faulty form (after step `from`, up to step `to`) and do in the healthy ones;
- moved: the contrary;
- ranks: these tensors differ between ranks in the faulty form alone;
- apart: these two tensors differ in the faulty form alone;
- progress: the faulty form's change of weights, projected on the twin's, is this share of it, and the mended form's 1;
- differs: the faulty form ends with other weights than the mended one;
- fact: a number that the script keeps lies in one range in the faulty form, and in another in the healthy ones.
"""

from __future__ import annotations

import math

import torch

from silent.case import FORMS, Case
from silent.process import Run, run

HEALTHY = FORMS[1:]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def collect(case: Case) -> dict[str, list[Run]]:
    """Run all forms of a case and keep their states."""
    return {form: run(case, form, "oracle") for form in FORMS}


def faults(case: Case, runs: dict[str, list[Run]] | None = None) -> list[str]:
    """Return a line for each claim of a case that does not hold in the runs of its forms."""
    runs = runs or collect(case)
    for form, results in runs.items():
        for rank, result in enumerate(results):
            if result.error:
                return [f"{form}, rank {rank}: {result.error}"]
            if not all(map(math.isfinite, result.losses)):
                return [f"{form}, rank {rank}: the loss is not finite, so the fault is not silent"]
    found = [line for claim, check in CHECKS.items() if claim in case.effect for line in check(case, runs)]
    if case.same and not _equal(_end(runs["mended"]), _end(runs["twin"])):
        found.append("the mended form does not end with the twin's weights")
    if len(runs["faulty"][0].losses) < case.step:
        found.append(f"the training ends before step {case.step}")
    return found


def _end(results: list[Run]) -> dict[str, torch.Tensor]:
    return results[0].snapshots[-1]


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    shared = one.keys() & other.keys()
    return bool(shared) and all(torch.allclose(one[name], other[name], **CLOSE) for name in shared)


def _moves(case: Case, results: list[Run], name: str) -> bool:
    snapshots = results[0].snapshots[case.effect.get("from", 0) : case.effect.get("to", 10**9) + 1]
    return any(not torch.equal(snapshots[0][name], later[name]) for later in snapshots[1:])


def _still(case, runs):
    for name in case.effect["still"]:
        if _moves(case, runs["faulty"], name):
            yield f"faulty: {name} moves"
        for form in HEALTHY:
            if not _moves(case, runs[form], name):
                yield f"{form}: {name} never moves"


def _moved(case, runs):
    for name in case.effect["moved"]:
        if not _moves(case, runs["faulty"], name):
            yield f"faulty: {name} never moves"
        for form in HEALTHY:
            if _moves(case, runs[form], name):
                yield f"{form}: {name} moves"


def _ranks(case, runs):
    for name in case.effect["ranks"]:
        for form, results in runs.items():
            first, second = (result.snapshots[-1][name] for result in results)
            if torch.allclose(first, second, **CLOSE) == (form == "faulty"):
                yield f"{form}: {name} {'is equal' if form == 'faulty' else 'differs'} on the two ranks"


def _apart(case, runs):
    one, other = case.effect["apart"]
    for form, results in runs.items():
        end = _end(results)
        if torch.allclose(end[one], end[other], **CLOSE) == (form == "faulty"):
            yield f"{form}: {one} and {other} are {'equal' if form == 'faulty' else 'apart'}"


def _progress(case, runs):
    def change(form: str) -> torch.Tensor:
        snapshots = runs[form][0].snapshots
        return torch.cat([(snapshots[-1][name] - snapshots[0][name]).flatten() for name in snapshots[0]])

    twin = change("twin")
    low, high = case.effect["progress"]
    for form, begin, end in (("faulty", low, high), ("mended", 0.6, 1.5)):
        share = float(change(form) @ twin / (twin @ twin))
        if not begin <= share <= end:
            yield f"{form}: {share:.3f} of the twin's progress, not {begin} to {end}"


def _differs(case, runs):
    faulty, mended = _end(runs["faulty"]), _end(runs["mended"])
    if _equal(faulty, mended):
        yield "faulty: ends with the weights of the mended form"


def _fact(case, runs):
    for name, ranges in case.effect["fact"].items():
        for form, results in runs.items():
            low, high = ranges["faulty" if form == "faulty" else "healthy"]
            if not low <= results[0].facts[name] <= high:
                yield f"{form}: {name} is {results[0].facts[name]:.4g}, not {low} to {high}"


CHECKS = {
    "still": _still, "moved": _moved, "ranks": _ranks, "apart": _apart, "progress": _progress,
    "differs": _differs, "fact": _fact,
}  # fmt: skip
