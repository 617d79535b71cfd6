"""Write docs/options.md, the table of the options of `watch` and of the flags of `nanwatch run`.

    python docs/make_options.py

A test fails where the page is not what this script writes.
"""

from __future__ import annotations

from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from nanwatch.session.options import Options

PLACE = Path(__file__).with_name("options.md")
HEAD = """\
# Options

Every option of `nanwatch.watch`, of the callbacks for trainers, and, where a command line can spell it, of
`nanwatch run`. The docstring of `watch` says more about each. The first column shows the default. This page is written
by `docs/make_options.py` from `nanwatch/session/options.py`.

| option | flag | meaning |
|---|---|---|
"""


def page() -> str:
    return HEAD + "".join(f"{row(option)}\n" for option in fields(Options))


def row(option: Field[Any]) -> str:
    known = option.metadata
    flag = f"`--{option.name.replace('_', '-')}`" if known["flag"] else ""
    meaning = ", ".join(filter(None, (known["text"], known["also"])))
    if known["needs"]:
        meaning += f"; needs `{known['needs'].replace(' or ', '` or `')}`"
    return f"| `{option.name}={option.default!r}` | {flag} | {meaning} |"


if __name__ == "__main__":
    PLACE.write_text(page(), encoding="utf-8")
