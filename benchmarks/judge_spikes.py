"""Count how many planted spikes are told at their step with their cause, and how many healthy trainings are silent.

    python benchmarks/judge_spikes.py                          # all: 6 minutes on one core
    python benchmarks/judge_spikes.py --sets jumps calm        # the plain networks alone: 4 minutes
    python benchmarks/judge_spikes.py --only lstm --lines

A planted case counts where its loss, or else a gradient norm, is at least 4 times its median before, within 8 steps. It
is right if the first report is of a step from the cause to the jump, has a class that is right, and names a module that
may be named. Half of each set was held back when the rule was chosen: `tuned` and `held` are scored apart.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from _spike_cases import CALM, FIRST_HALF, HEALTHY_FIRST, HEALTHY_SECOND, JUMPS, SECOND_HALF, Healthy, Planted
from _spike_training import Outcome, run

SETS: dict[str, tuple[tuple[Planted | Healthy, ...], tuple[Planted | Healthy, ...]]] = {
    "jumps": (JUMPS[::2], JUMPS[1::2]),
    "planted": (FIRST_HALF, SECOND_HALF),
    "calm": (CALM[::2], CALM[1::2]),
    "healthy": (HEALTHY_FIRST, HEALTHY_SECOND),
}


def judge(case: Planted, outcome: Outcome) -> tuple[str, str]:
    """Return "right", "wrong", "missed" or "no jump", and what was told."""
    jump = outcome.jump(case.since)
    told = "nothing"
    verdict = "missed"
    if outcome.spikes:
        spike = outcome.spikes[0]
        step = outcome.step_of(spike)
        module = "" if spike.first is None else spike.first.module
        told = f"step {step}: {spike.cause}" + (f" in {spike.first.place}" if spike.first else "")
        in_time = case.since <= step <= (len(outcome.steps) if jump is None else jump[0])
        is_named = not case.modules or (spike.first is not None and module.startswith(case.modules))
        verdict = "right" if in_time and spike.cause in case.causes and is_named else "wrong"
    if jump is None:
        return ("no jump" if verdict != "right" else verdict), told
    return verdict, f"{told}; jumps {jump[1]:.1f}x at {jump[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--half", choices=("tuned", "held"), help="one half alone")
    parser.add_argument("--only", default="", help="cases whose name holds this word")
    parser.add_argument(
        "--seed", type=int, default=0, help="added to the seeds: trainings that nobody has seen"
    )
    parser.add_argument("--lines", action="store_true", help="print the reports too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    scores: Counter[tuple[str, str, str]] = Counter()
    for name in args.sets:
        for half, cases in zip(("tuned", "held"), SETS[name], strict=True):
            for case in cases if args.half in (None, half) else ():
                if args.only not in case.name:
                    continue
                if isinstance(case, Planted):
                    outcome = run(case.make, case.plant, seed=case.seed + args.seed)
                    verdict, told = judge(case, outcome)
                    told += f"; wanted {' or '.join(case.causes)}"
                else:
                    outcome = run(case.make, steps=200, **{**case.how, "seed": case.how["seed"] + args.seed})
                    verdict = "wrong" if outcome.spikes else "right"
                    told = outcome.spikes[0].summary if outcome.spikes else "silent"
                scores[name, half, verdict] += 1
                print(f"{name:8} {half:6} {verdict:8} {case.name}: {told}", flush=True)
                for spike in outcome.spikes if args.lines else ():
                    print(spike)
    for name in args.sets:
        for half in ("tuned", "held"):
            found = {one: count for (*own, one), count in scores.items() if own == [name, half]}
            if found:
                total = sum(found.values()) - found.get("no jump", 0)
                rest = ", ".join(f"{count} {one}" for one, count in found.items() if one != "right")
                print(
                    f"{name} {half}: {found.get('right', 0)} of {total} right{f' ({rest})' if rest else ''}"
                )


if __name__ == "__main__":
    main()
