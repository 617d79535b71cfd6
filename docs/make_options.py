"""Write docs/options.md, the table of the options of `watch` and of the flags of `nanwatch run`.

    python docs/make_options.py

A test fails where the page is not what this script writes.
"""

from __future__ import annotations

from dataclasses import Field
from pathlib import Path
from typing import Any

from nanwatch.session.options import OLD_NAMES, OPTIONS

PLACE = Path(__file__).with_name("options.md")
HEAD = """\
# Options

The options of `nanwatch.watch`, of the [callbacks for trainers](integrations.md), of `nanwatch run` (as
`--ignore-modules`) and of [`NANWATCH_OPTIONS`](environment.md#options-without-code), which goes before the code. N
means every N-th: `1` is every one, `True` is 100.

| option and default | meaning |
|---|---|
"""
MIDDLE = """
`nanwatch.Trace(path, batches=(0, 3), counts=True, fingerprints=True, statistics=N, sketches=N)` says
[what a trace keeps](traces.md), `nanwatch.Audit(every=100, frozen="backbone.*")` what
[an audit](updates.md) takes for granted. As text: `run.parquet,fingerprints,batches=0+3` and `100,frozen=backbone.*`.

## Earlier names

| once | now |
|---|---|
"""


def page() -> str:
    options = "".join(
        f"| `{name}={default(option)}` | {option.metadata['text']} |\n" for name, option in OPTIONS.items()
    )
    names = "".join(f"| `{name}=` | {marked(now)} |\n" for name, now in OLD_NAMES.items())
    return HEAD + options + MIDDLE + names


def default(option: Field[Any]) -> str:
    is_words = isinstance(option.default, tuple) and option.default
    return repr(" ".join(option.default) if is_words else option.default)


def marked(now: str) -> str:
    """Return the text with the code at its start, if any, in backquotes."""
    code = now.partition(", ")[0] if now.endswith("wanted") else now
    return f"`{code}`{now[len(code) :]}" if "=" in code and " in the " not in code else now


if __name__ == "__main__":
    PLACE.write_text(page(), encoding="utf-8")
