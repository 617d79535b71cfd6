"""The line that tells how far long work is: when it is there, that it goes, and that it is in nobody's way."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import nanwatch
from nanwatch import __main__ as command
from nanwatch.distributed.merge import merge
from nanwatch.report.report import Report
from nanwatch.session.api import watch
from nanwatch.trace.trace_file import Trace
from nanwatch.util import progress
from support.processes import forking_python
from support.terminal import VARIABLES, Screen, Terminal, on_terminal
from support.toys import mlp

pytest.importorskip("rich")

Told = list[tuple[str, int, int | None, str]]

# A command in which each step that is told lasts until it is drawn.
SLOWLY = """
import sys, time
from nanwatch.util import progress
from nanwatch.__main__ import main
tell, render = progress._Line.tell, progress._Line._render
def tell_and_wait(line, *told):
    tell(line, *told)
    line.is_drawn = False
    end = time.monotonic() + 30
    while not line.is_drawn and time.monotonic() < end:
        time.sleep(0.01)
def render_and_note(line):
    line.is_drawn = True
    return render(line)
progress._Line.tell, progress._Line._render = tell_and_wait, render_and_note
sys.exit(main(sys.argv[1:]))
"""
PACKAGE = str(Path(nanwatch.__file__).parent.parent)
ZOO = """
import sys
from torch import nn
print("from the user's own code")
model = nn.Sequential(nn.Linear(2, 2))
"""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal of the kind that rich draws on."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    made = Terminal()
    yield made
    made.close()


@contextlib.contextmanager
def shown_on(terminal: Terminal) -> Iterator[progress.Tell]:
    """`shown`, with that terminal as stderr, which it is again afterwards."""
    # Not in the fixture: pytest puts a stderr of its own in place before each test.
    with mock.patch.object(sys, "stderr", terminal.file):
        try:
            with progress.shown() as tell:
                yield tell
        finally:
            assert sys.stderr is terminal.file


def until(found: Callable[[], bool]) -> None:
    """Wait for it."""
    end = time.monotonic() + 10
    while not found():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two traces, the reports of three ranks, a capsule, and the module of its model."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    for name, factor in (("a", 1.0), ("b", 3.0)):
        model = mlp()
        with torch.no_grad():
            model[2].weight.mul_(factor)
        with watch(model, trace=f"{name}.parquet") as w:
            for batch in (1.0, 2.0):
                model(torch.full((2, 3), batch))
            report = w.report()
    for rank in range(3):
        (tmp_path / f"run/rank-{rank}").mkdir(parents=True)
        document = json.loads(report.to_json()) | {"rank": rank}
        (tmp_path / f"run/rank-{rank}/report.json").write_text(json.dumps(document))
    nanwatch.write_capsule("capsule", nn.Sequential(nn.Linear(2, 2)), "", (torch.ones(1, 2),), {})
    (tmp_path / "zoo_of_progress.py").write_text(ZOO)
    monkeypatch.syspath_prepend(tmp_path)  # and with it, afterwards, what replay adds
    monkeypatch.delitem(sys.modules, "zoo_of_progress", raising=False)
    return tmp_path


def slowly(*arguments: str) -> list[str]:
    return [forking_python(), "-c", SLOWLY, *arguments]


COMMANDS = {
    "diff a.parquet b.parquet --json": ["reading a.parquet", "reading b.parquet", "aligning 1 of 2 batches"],
    "show a.parquet --batch 1": ["reading a.parquet", "making frames"],
    "formats a.parquet": ["reading a.parquet 24 of 24 rows"],
    "merge run": ["reading reports 1 of 3 files", "reading reports 2 of 3 files"],
    "replay capsule --model zoo_of_progress:model --dtype float64": [
        "importing zoo_of_progress:model",
        "replaying in float32 (as recorded)",
        "replaying in float64 1 of 2 runs",
    ],
}


@pytest.mark.parametrize(
    "arguments",
    ["merge run", *(pytest.param(one, marks=pytest.mark.slow) for one in COMMANDS if one != "merge run")],
)
def test_a_command_shows_its_steps_and_leaves_nothing(
    place: Path, capfdbinary: pytest.CaptureFixture[bytes], arguments: str
) -> None:
    """On a terminal each step was there and is gone; stdout and status are those without a terminal, to the byte."""
    status, printed, terminal = on_terminal(slowly(*arguments.split()), {"PYTHONPATH": PACKAGE})
    screen = terminal.close()
    shown = " | ".join(" ".join(line.split()) for line in screen.erased)
    for step in COMMANDS[arguments]:
        assert step in shown
    assert screen.is_whole
    # Output that the user's module printed while it was imported is the user's, and stays.
    assert screen.text == ("from the user's own code" if "replay" in arguments else "")
    capfdbinary.readouterr()
    assert command.main(arguments.split()) == status
    out, err = capfdbinary.readouterr()
    assert printed == out
    assert err in (b"", b"from the user's own code\n")


@pytest.mark.slow
def test_stderr_that_is_no_terminal_gets_nothing(place: Path) -> None:
    """Not even where rich was told to take everything for a terminal."""
    done = subprocess.run(
        slowly("merge", "run"),
        env={**os.environ, "PYTHONPATH": PACKAGE, "FORCE_COLOR": "1", "TERM": "xterm-256color"},
        capture_output=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"3 ranks" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_command_that_is_ended_leaves_a_terminal_to_type_at(place: Path, number: signal.Signals) -> None:
    """Ctrl-C: dead by SIGINT, which a shell calls 130, the line gone and not a word. SIGKILL: the cursor is there."""
    sent = threading.Event()

    def end_it(written: bytes, process: subprocess.Popen[bytes]) -> None:
        if b"reading" in written and not sent.is_set():
            sent.set()
            process.send_signal(number)

    status, printed, terminal = on_terminal(
        slowly("diff", "a.parquet", "b.parquet"), {"PYTHONPATH": PACKAGE}, at=end_it
    )
    screen = terminal.close()
    assert sent.is_set()
    assert (status, printed) == (-number, b"")
    assert screen.is_cursor_visible
    if number == signal.SIGINT:
        assert screen.is_whole
        assert screen.text == ""


@pytest.mark.slow
def test_ctrl_c_in_the_users_model_shows_where(place: Path) -> None:
    """A traceback of `replay`, below the line that is gone: it may be the user's code that hangs."""
    body = "import pathlib, time\npathlib.Path('imported').touch()\ntime.sleep(100)"
    (place / "zoo_of_progress.py").write_text(body)
    sent = threading.Event()

    def end_it(written: bytes, process: subprocess.Popen[bytes]) -> None:
        if (place / "imported").exists() and b"importing" in written and not sent.is_set():
            sent.set()
            process.send_signal(signal.SIGINT)

    arguments = slowly("replay", "capsule", "--model", "zoo_of_progress:model")
    status, printed, terminal = on_terminal(arguments, {"PYTHONPATH": PACKAGE}, at=end_it)
    screen = terminal.close()
    assert (status, printed) == (-signal.SIGINT, b"")
    assert screen.is_whole
    assert screen.text.startswith("Traceback")
    assert "time.sleep(100)" in screen.text
    assert screen.text.endswith("KeyboardInterrupt")


# In this process, for what needs no command.


@pytest.mark.parametrize(
    "setting", ["NO_COLOR=1", "TERM=dumb", "TERM=unknown", "TTY_INTERACTIVE=0", "TTY_COMPATIBLE=0", "no rich"]
)
def test_where_rich_would_not_draw_nothing_is_written(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """By the environment, or without the package."""
    if setting == "no rich":
        for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "rich", None)
    else:
        monkeypatch.setenv(*setting.split("="))
    with shown_on(terminal) as tell:
        tell("working")
        time.sleep(0.3)
        sys.stderr.write("a warning\n")
    terminal.close()
    assert terminal.written == b"a warning\r\n"


def test_what_is_written_meanwhile_stays(terminal: Terminal) -> None:
    """Lines stay above the progress, which is gone at the end."""
    with shown_on(terminal) as tell:
        tell("working", 1, 2, "pieces")
        until(lambda: b"working" in terminal.written)
        sys.stderr.write("one\n")
        sys.stderr.write("two\n")
    screen = terminal.close()
    assert screen.text == "one\ntwo"
    assert screen.is_whole


@pytest.mark.parametrize("error", [ValueError("a fault"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_goes_through(terminal: Terminal, error: BaseException) -> None:
    """The very one, after the line has gone."""

    def work() -> None:
        with shown_on(terminal) as tell:
            tell("working")
            until(lambda: b"working" in terminal.written)
            raise error

    with pytest.raises(type(error)) as raised:
        work()
    assert raised.value is error
    screen = terminal.close()
    assert (screen.is_whole, screen.text) == (True, "")


def test_a_terminal_that_goes_away_ends_the_line_alone(terminal: Terminal) -> None:
    """The window is closed: the work goes on to its end."""
    done = False
    with shown_on(terminal) as tell:
        tell("working")
        until(lambda: b"working" in terminal.written)
        terminal.hang_up()
        time.sleep(0.3)
        tell("working still")
        done = True
    assert done
    terminal.written = b""  # which may end within a sequence


def test_in_the_background_there_is_no_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal is another job's, such as the shell's."""
    monkeypatch.setattr(os, "tcgetpgrp", lambda descriptor: os.getpgrp() + 1)
    with shown_on(terminal) as tell:
        assert tell is progress.silent


def test_without_stderr_there_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed from the start, as by `2>&-`."""
    monkeypatch.setattr(sys, "stderr", None)
    with progress.shown() as tell:
        assert tell is progress.silent


@given(
    what=st.text(max_size=120),
    done=st.integers(0, 10**7),
    total=st.none() | st.integers(0, 10**7),
    width=st.integers(1, 120),
)
@example(what="a\x1b[2J\u202eb\nc\td\udc80", done=3, total=7, width=80)
@example(what="reading", done=1_000_000, total=None, width=9)
def test_it_is_one_line_of_plain_text(what: str, done: int, total: int | None, width: int) -> None:
    """With any text and any width of the terminal, nothing moves the cursor or starts another line."""
    from rich.cells import cell_len
    from rich.console import Console

    line = progress._Line(io.StringIO())
    line.tell(what, done, total, "rows")
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(line._render())
    (text,) = capture.get().splitlines()
    assert not [one for one in text if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert cell_len(text) <= width
    if width == 120 and what.isascii() and what.isprintable() and 0 < len(what) < 40 and total:
        assert f"{done:,} of {total:,} rows" in text


# Progress that the work reports.


def collected() -> tuple[Told, progress.Tell]:
    told: Told = []

    def tell(what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
        told.append((what, done, total, unit))

    return told, tell


def test_reading_tells_the_rows(place: Path) -> None:
    """All of them at the end; of some batches those that were read, as nobody knows how many there will be."""
    pq = pytest.importorskip("pyarrow.parquet")
    (place / "parts").mkdir()
    whole = pq.read_table("a.parquet")
    for number in range(3):
        pq.write_table(whole, f"parts/part-{number:05}.parquet")
    told, tell = collected()
    trace = Trace.open("parts", tell)
    assert told == []
    assert trace.table().num_rows == 3 * whole.num_rows
    amounts = [(done, total) for what, done, total, _ in told if what == "reading parts"]
    assert amounts[0] == (0, 3 * whole.num_rows)
    assert amounts[-1] == (3 * whole.num_rows, 3 * whole.num_rows)
    assert amounts == sorted(amounts)
    assert len(set(amounts)) > 2  # piece by piece
    told.clear()
    frames = trace.frames(1)
    rows = 3 * sum(batch == 1 for batch in whole["batch"].to_pylist())
    assert [one for one in told if one[1]][-1] == ("making frames", rows, rows, "rows")
    assert ("reading parts", rows, None, "rows") in told
    assert len(frames) == len([one for one in told if one[0] == "making frames"])


def test_comparing_and_merging_tell_batches_and_files(place: Path) -> None:
    """Each one, counted from none, out of all; and the result is that of the function that tells nobody."""
    told, tell = collected()
    a, b = (nanwatch.Trace.open(f"{name}.parquet", tell) for name in "ab")
    assert nanwatch.diff(a, b) == nanwatch.diff("a.parquet", "b.parquet")
    batches = [one for one in told if one[3] == "batches"]
    assert batches == [("aligning", i, 2, "batches") for i in range(2)]
    told.clear()
    assert merge(Path("run"), tell=tell) == merge(Path("run"))
    assert told[1:] == [("reading reports", i, 3, "files") for i in range(3)]


def test_drawing_a_page_tells_the_frames(place: Path) -> None:
    """Each one, and the page is the same."""
    pytest.importorskip("jinja2")
    report = Report.from_json(Path("run/rank-0/report.json").read_text())
    told, tell = collected()
    assert report.to_html(tell) == report.to_html()
    assert [done for _, done, _, unit in told if unit == "frames"] == list(range(len(report.frames)))


def test_a_screen_shows_what_a_terminal_would() -> None:
    """The tests' own terminal, by sequences whose meaning is known."""
    assert Screen.after(b"one\r\ntwo\x1b[31m!\x1b[0m").text == "one\ntwo!"
    assert Screen.after(b"longer\rshort").text == "shortr"
    gone = Screen.after(b"above\r\nline\r\n\x1b[1A\x1b[2K")
    assert (gone.text, gone.is_whole, gone.erased) == ("above", True, ["line"])
    assert not Screen.after(b"\x1b[?25l").is_cursor_visible
    assert not Screen.after(b"left").is_whole
    for unknown in (b"\x1b[5n", b"\x07"):
        with pytest.raises(AssertionError, match="unknown"):
            Screen.after(unknown)
