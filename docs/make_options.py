"""Write docs/options.md, the table of the options of `watch` and of the flags of `nanwatch run`.

    python docs/make_options.py

A test fails where the page is not what this script writes.
"""

from __future__ import annotations

from pathlib import Path

from nanwatch.session.api import GIVEN, TEXTS

PLACE = Path(__file__).with_name("options.md")
HEAD = """\
# Options

These are the keyword arguments of `nanwatch.watch` and of the [callbacks for trainers](integrations.md), the flags of
`nanwatch run` (`ignore_modules` is `--ignore-modules`), and the words of the environment variable
[`NANWATCH_OPTIONS`](environment.md#options-without-code); `optimizer` is for code alone. What the variable says
replaces what the code says. `True` for `audit`, `replicas` and `attention` means every 100th step or batch. `None`
chooses by the other options ([`rerun`](rerun.md#when-does-it-run),
[`black_box`](blackbox.md#where-does-it-lie-and-how-long)).

| option and default | meaning |
|---|---|
"""
TAIL = """
`nanwatch.Trace(path, batches=(0, 3), counts=True, fingerprints=True, sketches=N)` says
[what a trace keeps](traces.md), `nanwatch.Audit(every=100, frozen="backbone.*")` what
[an audit](updates.md) takes for granted. The command line and `NANWATCH_OPTIONS` spell them as text:
`run.parquet,fingerprints,batches=0+3` and `100,frozen=backbone.*`.

## Earlier names

| once | now |
|---|---|
| `weights=`, `buffers=`, `inputs=`, `outputs=` | `read="weights outputs"`, with the words that are wanted |
| `include=` | `modules=` |
| `exclude=` | `ignore_modules=` |
| `allow_inf=` | `allow="inf:mask*"` |
| `allow_nan=` | `allow="nan:embed"` |
| `counts=` | `trace=nanwatch.Trace(path, counts=True)` |
| `fingerprints=` | `trace=nanwatch.Trace(path, fingerprints=True)` |
| `sketches=` | `trace=nanwatch.Trace(path, sketches=N)` |
| `trace_batches=` | `trace=nanwatch.Trace(path, batches=(0, 3))` |
| `abort_after_batch=` | a `break` in your loop |
| `enabled=` | `NANWATCH=0` in the environment, or no call of `watch()` |
| `check=` | `NANWATCH_ACT_AT` in the environment; the default suits the device |
| `updates=` | `audit=` |
| `frozen=` | `audit=nanwatch.Audit(frozen=...)` |
| `max_skipped_steps=` | nothing: the 21st step in a row that a GradScaler skips is a failure |
| `scaler=` | nothing: the watch finds the GradScaler that is in use |
| `peer_timeout=` | `NANWATCH_PEER_TIMEOUT` in the environment |
| `stall_timeout=` | `NANWATCH_STALL_TIMEOUT` in the environment |
| `log_every=` | `every`, an attribute of `nanwatch.Sink` |
| `microscope=` | `rerun=` |
| `log_to=` | `sinks=`, such as `sinks="tensorboard:runs/a"` |
"""


def page() -> str:
    options = (f"| `{name}={default!r}` | {TEXTS[name]} |\n" for name, default in GIVEN.items())
    return HEAD + "".join(options) + TAIL


if __name__ == "__main__":
    PLACE.write_text(page(), encoding="utf-8")
