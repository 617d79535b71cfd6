"""Write docs/options.md, the table of the options of `watch` and of the flags of `nanwatch run`.

    python docs/make_options.py

A test fails where the page is not what this script writes.
"""

from __future__ import annotations

from dataclasses import Field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from nanwatch.session.options import Options

PLACE = Path(__file__).with_name("options.md")
HEAD = """\
# Options

Every option of `nanwatch.watch`, of the callbacks for trainers, and, where a command line can spell it, of
`nanwatch run`, by the question that it answers. The docstring of `watch` says more about each. The first column shows
the default. This page is written by `docs/make_options.py` from `nanwatch/session/options.py`.
"""
SECTION = """
## {}

| option | flag | meaning |
|---|---|---|
"""
TAIL = """
## Earlier names

| once | now |
|---|---|
| `microscope=` | `rerun=` |
| `log_to="runs/a"` | `sinks="tensorboard:runs/a"` or `sinks=Path("runs/a")` |
| `log_to=` a SummaryWriter, a run of wandb, a function | `sinks=` the same |
| `sketches=0` | `sketches=False` |
"""


def page() -> str:
    groups = groupby(fields(Options), key=lambda option: option.metadata["group"])
    sections = (
        SECTION.format(title) + "".join(f"{row(option)}\n" for option in group) for title, group in groups
    )
    return HEAD + "".join(sections) + TAIL


def row(option: Field[Any]) -> str:
    known = option.metadata
    flag = f"`--{option.name.replace('_', '-')}`" if known["flag"] else ""
    meaning = ", ".join(filter(None, (known["text"], known["also"])))
    if known["needs"]:
        meaning += f"; needs `{known['needs'].replace(' or ', '` or `')}`"
    return f"| `{option.name}={option.default!r}` | {flag} | {meaning} |"


if __name__ == "__main__":
    PLACE.write_text(page(), encoding="utf-8")
