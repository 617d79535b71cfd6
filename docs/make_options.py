"""Write docs/options.md, the table of the options of `watch` and of the flags of `nanwatch run`.

    python docs/make_options.py

A test fails where the page is not what this script writes.
"""

from __future__ import annotations

from dataclasses import Field
from pathlib import Path
from typing import Any

from nanwatch.session.options import OPTIONS

PLACE = Path(__file__).with_name("options.md")
HEAD = """\
# Options

The options of `nanwatch.watch`, of the [callbacks for trainers](integrations.md), of `nanwatch run` (as
`--ignore-modules`) and of [`NANWATCH_OPTIONS`](environment.md#options-without-code), which goes before the code. N
means every N-th: `1` is every one, `True` is 100.

| option and default | meaning |
|---|---|
"""
TAIL = """
`nanwatch.Trace(path, batches=(0, 3), counts=True, fingerprints=True, sketches=N)` says
[what a trace keeps](traces.md), `nanwatch.Audit(every=100, frozen="backbone.*")` what
[an audit](updates.md) takes for granted. As text: `run.parquet,fingerprints,batches=0+3` and `100,frozen=backbone.*`.

## Earlier names

| once | now |
|---|---|
| `weights=`, `buffers=`, `inputs=`, `outputs=` | `read="weights outputs"`, with the words that are wanted |
| `include=` | `modules=` |
| `exclude=` | `ignore_modules=` |
| `allow_inf="mask.*"` | `allow="inf:mask.*"` |
| `allow_nan="embed"` | `allow="nan:embed"` |
| `counts=` | `trace=nanwatch.Trace(path, counts=True)` |
| `fingerprints=` | `trace=nanwatch.Trace(path, fingerprints=True)` |
| `sketches=` | `trace=nanwatch.Trace(path, sketches=N)` |
| `trace_batches=` | `trace=nanwatch.Trace(path, batches=(0, 3))` |
| `abort_after_batch=` | a `break` in your loop |
| `enabled=` | NANWATCH=0 in the environment, or no call of watch() |
| `check=` | the device: at the module on a CPU, at the end of the batch on a GPU; NANWATCH_ACT_AT changes it |
| `updates=` | `audit=` |
| `frozen=` | `audit=nanwatch.Audit(frozen=...)` |
| `max_skipped_steps=` | nothing: the 21st step in a row that a GradScaler skips is a failure |
| `scaler=` | nothing: the watch finds the GradScaler that is in use |
| `peer_timeout=` | NANWATCH_PEER_TIMEOUT in the environment |
| `stall_timeout=` | NANWATCH_STALL_TIMEOUT in the environment |
| `log_every=` | `every`, an attribute of nanwatch.Sink |
| `microscope=` | `rerun=` |
| `log_to=` | `sinks=`, such as "tensorboard:runs/a" |
"""


def page() -> str:
    options = "".join(
        f"| `{name}={default(option)}` | {option.metadata['text']} |\n" for name, option in OPTIONS.items()
    )
    return HEAD + options + TAIL


def default(option: Field[Any]) -> str:
    is_words = isinstance(option.default, tuple) and option.default
    return repr(" ".join(option.default) if is_words else option.default)


if __name__ == "__main__":
    PLACE.write_text(page(), encoding="utf-8")
