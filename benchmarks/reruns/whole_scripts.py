"""Whole scripts, run as `python train.py` would run them. Their `state` is compared."""

from __future__ import annotations

import runpy
from pathlib import Path

from reruns.case import case


def run(name):
    """Run the script and return its state."""
    return runpy.run_path(str(Path(__file__).parent / "scripts" / name), run_name="__main__")["state"]


@case("div", cure=True, script="scripts/train.py")
def script_with_its_loop_at_the_top():
    return run("train.py")


@case("sqrt", cure=True, script="scripts/count.py")
def script_whose_loss_counts_in_a_global():
    return run("count.py")
