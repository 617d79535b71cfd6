"""Commands that read files, `diff`, `show`, `fits` and `top`: exit status, output, bad use, and one JSON document."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from nanwatch.cli.files import show_main
from nanwatch.report.report import Report
from nanwatch.session.api import watch
from nanwatch.trace.trace_file import Trace
from support.black_boxes import black_box, needs_box
from support.commands import run
from support.html_page import SPIKE
from support.processes import forked
from support.toys import mlp
from support.written_traces import write_rows

pytest.importorskip("pyarrow")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two traces of two batches, of which the second model has a larger weight, as the current one."""
    monkeypatch.chdir(tmp_path)
    for name, factor in (("a", 1.0), ("b", 3.0)):
        model = mlp()
        with torch.no_grad():
            model[2].weight.mul_(factor)
        with watch(model, trace=f"{name}.parquet"):
            for batch in (1.0, 2.0):
                model(torch.full((2, 3), batch))
    return tmp_path


def test_show_has_a_saved_spike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    file.write_text(SPIKE.to_json())
    assert run(capsys, "show", str(tmp_path)) == (0, f"{SPIKE.to_text()}\n", "")
    assert run(capsys, "show", str(file), "--json") == (0, f"{SPIKE.to_json()}\n", "")


def test_diff_tells_whether_traces_differ(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "diff", "a.parquet", "b.parquet")
    assert (status, err) == (1, "")
    assert "First:      `weight` of 2 (Linear) in batch 0: abs_max" in out
    assert "Grew:       x 3.00" in out
    status, out, err = run(capsys, "diff", "a.parquet", "b.parquet", "--json")
    document = json.loads(out)
    assert (status, err, document["equal"]) == (1, "", False)
    assert [document["first"][key] for key in ("batch", "module_a", "label")] == [0, "2", "weight"]
    status, out, _ = run(capsys, "diff", "a.parquet", "--batches", "0", "1")
    assert status == 1
    assert "`input[0]` of 0 (Linear) in batch 0 and batch 1: abs_max 1 against 2" in " ".join(out.split())
    document = json.loads(run(capsys, "diff", "a.parquet", "a.parquet", "--json")[1])
    assert (document["equal"], document["first"]) == (True, None)
    assert run(capsys, "diff", "a.parquet", "b.parquet", "--rtol", "0.99")[0] == 0
    assert run(capsys, "diff", "a.parquet", "b.parquet", "--ignore", "range")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("diff", "a.parquet"), "name a second one"),
        (("diff", "a.parquet", "--batches", "0", "9"), "no batch 9; it has batches 0 to 1"),
        (("diff", "a.parquet", "b.parquet", "--rtol", "2"), "rtol should be"),
        (("diff", "a.parquet", "b.parquet", "--html", "no/such/page.html"), "there is no folder 'no/such'"),
        (("show", "none.json"), "no file or folder 'none.json': show reads a trace"),
        (("show", "--ranks", "pipe"), "no file or folder 'pipe'"),
        (("show", "words.txt"), "words.txt is neither a report nor a trace"),
        (("show", "bad.json"), "not a nanwatch report"),
        (("fits", "none"), "there is no trace"),
        (("show", "--box", "words.txt"), "words.txt cannot be read as a black box"),
        (("show", "--box", "."), "has no black box that can be read"),
        (("show",), "has no black box that can be read"),
        (("fits", "a.parquet", "--margin-bits", "-1"), "margin_bits"),
    ],
)
def test_bad_use_is_status_2_and_one_line(place, capsys, monkeypatch, arguments, words):
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "none"))
    (place / "words.txt").write_text("words")
    os.mkfifo(place / "pipe")
    (place / "bad.json").write_text('{"schema": 1}')
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_show_prints_a_batch_as_a_report(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "show", "a.parquet")
    assert status == 0
    assert out.endswith(f"{Trace.open('a.parquet').report(1).to_text()}\n")
    status, out, _ = run(capsys, "show", "a.parquet", "--batch", "0", "--json")
    report = Report.from_json(out)
    assert (status, report.frames) == (0, Trace.open("a.parquet").frames(0))
    (place / "report.json").write_text(out)
    status, again, _ = run(capsys, "show", "report.json")
    assert (status, again) == (0, f"{report.to_text()}\n")
    assert run(capsys, "show", str(place))[:2] == (0, again)  # the folder of a failure
    assert "--batch is for a trace" in run(capsys, "show", "report.json", "--batch", "0")[2]


def test_show_takes_the_newest_report_of_a_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the time of its file; the name says which it is. The folder's own report goes first, and
    that of a rank that has not failed last.
    """
    for name, when in (("batch-9", 2), ("batch-3", 3), ("batch-5", 1), ("peer-rank-2", 4)):
        (place / "out" / name).mkdir(parents=True)
        file = place / "out" / name / "report.json"
        file.write_text(Report((), None, when).to_json())
        os.utime(file, (when, when))
    text = Report((), None, 3).to_text()
    assert run(capsys, "show", "out") == (0, f"{Path('out/batch-3/report.json')}:\n\n{text}\n", "")
    (place / "out" / "report.json").write_text(Report((), None, 7).to_json())
    assert run(capsys, "show", "out") == (0, f"{Report((), None, 7).to_text()}\n", "")


def test_pages_are_written_and_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    status, plain, _ = run(capsys, "diff", "a.parquet", "b.parquet")
    two = ("diff", "a.parquet", "b.parquet", "--html", "d.html")
    assert run(capsys, *two) == (status, f"{plain}\nwrote d.html\n", "")
    assert run(capsys, *two, "--json") == run(capsys, *two[:3], "--json")
    assert "They part at weight of 2" in (place / "d.html").read_text(encoding="utf-8")
    heading = run(capsys, "show", "a.parquet")[1].splitlines()[0]
    for more, expected in (
        ((), "How near the run came to overflow"),
        (("--batch", "1"), "All finite up to batch 1"),
    ):
        arguments = ("show", "a.parquet", *more)
        assert run(capsys, *arguments, "--html", "s.html") == (0, f"{heading}\n\nwrote s.html\n", "")
        assert expected in (place / "s.html").read_text(encoding="utf-8")
        assert run(capsys, *arguments, "--html", "s.html", "--json") == run(capsys, *arguments, "--json")


def test_without_pyarrow_the_extra_is_named(place: Path) -> None:
    script = """
import sys
sys.modules["pyarrow"] = None
import torch, nanwatch
from nanwatch.__main__ import main
for arguments in (["diff", "a.parquet", "b.parquet"], ["show", "a.parquet"], ["fits", "a.parquet"]):
    assert main(arguments) == 2
model = torch.nn.Linear(2, 2)
with nanwatch.watch(model):
    model(torch.ones(1, 2))
try:
    nanwatch.watch(model, trace="c.parquet")
except ImportError as error:
    print(error)
"""
    done = forked("-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pip install pyarrow") == 3
    assert "trace= needs the package `pyarrow`" in done.stdout
    assert not (place / "c.parquet").exists()


def test_fits_answers_whether_a_format_fits(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "fits", "a.parquet")
    assert status == 0
    assert len([line for line in out.splitlines() if ", float32)" in line]) == 6
    status, out, _ = run(capsys, "fits", "a.parquet", "--for", "float16")
    assert (status, out.splitlines()[0]) == (
        0, "float16: fits all 6 outputs and weights of modules. Nothing overflows, even 2 times as large."
    )  # fmt: skip
    status, out, _ = run(capsys, "fits", "a.parquet", "--for", "float16", "--margin-bits", "40")
    assert status == 1
    assert out.startswith("float16: does not fit 6 of 6 outputs and weights of modules.")
    assert len([line for line in out.splitlines() if " no room " in line and ", float32)" in line]) == 6
    status, out, _ = run(capsys, "fits", "a.parquet", "--for", "float16", "--json")
    document = json.loads(out)
    assert status == 0
    assert (document["margin_bits"], document["format"], document["fits"]) == (1.0, "float16", True)
    parts = [(need["module"], need["part"]) for need in document["modules"]]
    weights = [("0", "weights"), ("2", "weights")]
    assert sorted(parts) == sorted(weights + [(name, "outputs") for name in ("0", "1", "2", "")])
    assert {need["verdicts"]["float16"] for need in document["modules"]} == {"fits"}


@needs_box
def test_a_process_that_runs_is_told_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with black_box(tmp_path), watch(model, black_box=True):
        model(torch.ones(1, 2))
        assert show_main([str(tmp_path)]) == 0
        text = capsys.readouterr().out
        assert show_main(["--box", str(tmp_path), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
    assert "it runs" in text
    assert "0 (Linear)" in text
    assert (document["schema"], document["version"]) == ("nanwatch.blackbox", 3)
    assert (document["end"], document["num_calls"]) == ("runs", 2)
    assert [call["module"] for call in document["calls"]] == ["0", ""]


SPIKE_TEXT = (
    "spike in batch 39: loss 9.1, usually 2.4 (55 deviations); cause: module, first in `output` of whole"
)


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
    part(folder, 0, told=[SPIKE_TEXT, *forecasts])
    part(folder, 1, told=[SPIKE_TEXT])
    _, out, _ = run(capsys, "top", str(folder), "--once")
    assert out.splitlines()[1:4] == ["batch 19: forecast: 1", "batch 19: forecast: 2", SPIKE_TEXT]
    assert len(out.splitlines()) == 1 + 3 + 1 + 3
    _, out, _ = run(capsys, "top", str(folder), "--json")
    document = json.loads(out)["marks"]
    assert [mark["text"] for mark in document] == [SPIKE_TEXT, *forecasts, SPIKE_TEXT]
    place = dict(zip(("kind", "batch", "module", "label"), ("spike", 39, "whole", "output"), strict=True))
    assert document[-1] == {**place, "text": SPIKE_TEXT}


def test_the_live_view(tmp_path, capsys, monkeypatch):
    """On a terminal it shows a part that comes later, and ends at Ctrl-C."""
    folder = tmp_path / "run"
    part(folder, 0, falling="[red]falling", told=[SPIKE_TEXT])
    parts = iter([1])

    def sleep(seconds: float) -> None:
        assert seconds == 2
        if (number := next(parts, None)) is None:
            raise KeyboardInterrupt
        part(folder, number, falling="[red]falling", told=[SPIKE_TEXT])

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    status, out, err = run(capsys, "top", str(folder))
    first, second = out.split("\x1b[H\x1b[2J")[1:]
    assert (status, err) == (0, "")
    assert "20 of them" in first
    assert first.index("still") < first.index("[red]falling")
    assert "40 of them" in second
    assert SPIKE_TEXT in second
    assert run(capsys, "top", str(folder), "--once") == (0, second, "")
