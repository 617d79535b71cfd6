"""`nanwatch top`: a trace that is still written, what comes first, and the live view on a terminal."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.commands import run
from support.written_traces import write_rows

SPIKE = "spike in batch 39: loss 9.1, usually 2.4 (55 deviations); cause: module, first in `output` of whole"


def part(folder: Path, number: int, falling: str = "falling", told: Sequence[str] = ()) -> None:
    """A part of 20 batches in which `falling` loses a bit each and `still` has the least room.

    In its last batch all of `told` was reported of `whole`.
    """
    folder.mkdir(exist_ok=True)
    bits = {"still": lambda _: 4.0, falling: lambda i: 30.0 - i % 20, "whole": lambda _: 12.0}
    rows = [
        {"batch": i, "call": call, "module": module, "abs_max": 65504 * 2.0 ** -room(i)}
        for i in range(20 * number, 20 * number + 20)
        for call, (module, room) in enumerate(bits.items())
    ]
    nothing = dict.fromkeys(("shape", "dtype", "abs_min", "abs_max", "isfinite"))
    place = {"batch": 20 * number + 19, "call": 3, "module": "whole", "phase": "step"}
    for text in told:
        kind = "spike" if text.startswith("spike") else "forecast"
        note = {"note": kind, "note_text": text.removeprefix("forecast: ")}
        rows.append({**place, **nothing, **note})
    whole = write_rows(folder.parent / "whole", rows)
    whole.replace(folder / f"part-{number:05}.parquet")


def test_what_comes_first_and_of_which_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    part(folder, 0)
    part(folder, 1)
    status, out, err = run(capsys, "top", str(folder), "--once")
    lines = [line.split() for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == f"{folder}: batches 0 to 39 (40 of them), rank 0"
    assert lines[2:] == [
        ["4.0", "bits", "+0.0", "0", "4.09e+03", "still"],
        ["11.0", "bits", lines[3][2], "19", "3.20e+01", "falling"],
        ["12.0", "bits", "+0.0", "0", "1.60e+01", "whole"],
    ]
    _, out, _ = run(capsys, "top", str(folder), "--by", "trend")
    assert out.splitlines()[2].split() == ["11.0", "bits", lines[3][2], "19", "3.20e+01", "falling"]


def test_spikes_and_forecasts_stand_above_the_table(tmp_path, capsys):
    """The latest three of the batches that are looked at; all of them in JSON."""
    folder = tmp_path / "run"
    forecasts = [f"forecast: {i}" for i in range(3)]
    part(folder, 0, told=[SPIKE, *forecasts])
    part(folder, 1, told=[SPIKE])
    _, out, _ = run(capsys, "top", str(folder), "--once")
    assert out.splitlines()[1:4] == ["batch 19: forecast: 1", "batch 19: forecast: 2", SPIKE]
    assert len(out.splitlines()) == 1 + 3 + 1 + 3
    _, out, _ = run(capsys, "top", str(folder), "--json")
    document = json.loads(out)["marks"]
    assert [mark["text"] for mark in document] == [SPIKE, *forecasts, SPIKE]
    assert document[-1] == {"kind": "spike", "batch": 39, "module": "whole", "label": "output", "text": SPIKE}


def test_the_live_view(tmp_path, capsys, monkeypatch):
    """On a terminal it shows a part that comes later, and ends at Ctrl-C."""
    folder = tmp_path / "run"
    part(folder, 0, falling="[red]falling", told=[SPIKE])
    parts = iter([1])

    def sleep(seconds: float) -> None:
        assert seconds == 2
        if (number := next(parts, None)) is None:
            raise KeyboardInterrupt
        part(folder, number, falling="[red]falling", told=[SPIKE])

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    status, out, err = run(capsys, "top", str(folder))
    first, second = out.split("\x1b[H\x1b[2J")[1:]
    assert (status, err) == (0, "")
    assert "20 of them" in first
    assert first.index("still") < first.index("[red]falling")
    assert "40 of them" in second
    assert SPIKE in second
    assert run(capsys, "top", str(folder), "--once") == (0, second, "")
