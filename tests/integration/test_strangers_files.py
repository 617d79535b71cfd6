"""Files of strangers: pipes, devices, endless and damaged ones end a command in one line, within seconds."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nanwatch
from nanwatch import __main__ as command
from nanwatch.distributed.merge import merge
from nanwatch.report.report import Report
from nanwatch.util import reading
from support.toys import mlp

pyarrow = pytest.importorskip("pyarrow")

# Memory for the interpreter, torch and pyarrow, and little more: an endless file would take all there is.
LIMITED = """\
import contextlib, io, json, resource, sys
import pyarrow.dataset
from nanwatch.__main__ import main
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (2 << 30),) * 2)
for arguments in json.loads(sys.argv[1]):
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        status = main(arguments)
    print(json.dumps([status, out.getvalue(), error.getvalue()]))
"""
COMMANDS = {
    "show": ("show",),
    "merge": ("merge",),
    "formats": ("formats",),
    "top": ("top",),
    "diff": ("diff", "--batches", "0", "1"),
    "replay": ("replay", "--model", "torch.nn:Identity"),
}
FILES = {"replay": "capsule.json", "merge": "report.json"}


def assert_refused(commands: list[list[str]]) -> None:
    """Each with one line and the status that its help names; run in a process of limited time and memory."""
    given = [sys.executable, "-c", LIMITED, json.dumps(commands)]
    done = subprocess.run(given, capture_output=True, text=True, timeout=120, check=True)
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    for (name, *_), (status, out, error) in zip(commands, outcomes, strict=True):
        assert (status, out, error.count("\n")) == (2, "", 1), error
        assert error.startswith(f"nanwatch {name}: ")


def placed(kind: str, path: Path) -> Path:
    """A file at `path` that is none to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("kind", ["pipe", pytest.param("zero", marks=pytest.mark.slow)])
def test_no_command_waits_for_a_pipe_or_reads_a_device(kind: str, tmp_path: Path) -> None:
    """Named by the user, or where a capsule, a job or a trace has its files."""
    commands = []
    for name, arguments in COMMANDS.items():
        inside = placed(kind, tmp_path / name / FILES.get(name, "part-00000.parquet"))
        commands += [[*arguments, str(place)] for place in (inside, inside.parent)]
    assert_refused(commands)


def saved(path: Path, rank: int) -> Path:
    """A healthy report."""
    path.parent.mkdir(parents=True)
    path.write_text(Report((), None, 3, rank).to_json())
    return path


@pytest.mark.parametrize("kind", ["pipe", pytest.param("zero", marks=pytest.mark.slow)])
def test_merge_leaves_out_what_is_no_file(kind: str, tmp_path: Path) -> None:
    """The ranks that have a report are merged, and a link to one is followed."""
    saved(tmp_path / "0" / "report.json", 0)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "report.json").symlink_to(saved(tmp_path / "elsewhere" / "rank1.json", 1))
    (tmp_path / "2").mkdir()
    bad = placed(kind, tmp_path / "2" / "report.json")
    merged = merge(tmp_path)
    assert merged.ranks == [0, 1]
    assert merged.left_out == (f"{bad}: is no regular file",)


@pytest.mark.slow
def test_what_is_read_is_bounded(tmp_path: Path) -> None:
    """To the byte; nothing beyond it is taken into memory."""
    path = tmp_path / "x"
    path.write_bytes(b"a" * 100)
    assert reading.file_text(path, 100) == "a" * 100
    with pytest.raises(ValueError, match="has more than 99 bytes"):
        reading.file_text(path, 99)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room on disk
        file.write(b"{")
    assert_refused([["merge", str(path)], ["show", str(path)]])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The content of a trace of a few batches."""
    path = tmp_path_factory.mktemp("trace") / "whole.parquet"
    model = mlp()
    with nanwatch.watch(model, trace=path, counts=True):
        for _ in range(3):
            model(torch.ones(2, 3))
    return path.read_bytes()


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> int:
    """The exit status; with 2 there is one line that says why."""
    status = command.main(list(arguments))
    printed = capsys.readouterr()
    assert status in (0, 1, 2)
    if status == 2:
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert printed.err.startswith(f"nanwatch {arguments[0]}: ")
    else:
        assert printed.err == ""
    return status


@pytest.mark.parametrize("name", ["show", "formats", "diff", "top"])
def test_a_truncated_trace_is_refused(
    name: str, whole: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace that ends anywhere, as after a full disk, is refused."""
    path = tmp_path / "cut.parquet"
    for length in [*range(12), *range(12, len(whole), 211), *range(len(whole) - 12, len(whole))]:
        path.write_bytes(whole[:length])
        assert outcome(capsys, *COMMANDS[name], str(path)) == 2


@pytest.mark.parametrize("name", ["show", "formats", "diff", "top"])
def test_a_damaged_trace_ends_no_command_by_a_traceback(
    name: str, whole: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes of its index or of its columns are others: it is refused, or shown where nothing tells."""
    chance = random.Random(0)
    path = tmp_path / "damaged.parquet"
    index = int.from_bytes(whole[-8:-4], "little")
    for number in range(60):
        damaged = bytearray(whole)
        first = len(whole) - 8 - index if number % 2 else 0
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(first, len(whole))] = chance.randrange(256)
        path.write_bytes(damaged)
        outcome(capsys, *COMMANDS[name], str(path))


@pytest.mark.parametrize(
    "kind",
    [
        "ArrowInvalid",
        "ArrowNotImplementedError",  # an integer of 128 bits
        "ArrowKeyError",
        "ArrowTypeError",
        "ArrowMemoryError",  # a column of 2^60 rows
        "ArrowSerializationError",
    ],
)
@pytest.mark.parametrize("where", ["schema", "scanner"])
def test_whatever_pyarrow_raises_is_a_clean_end(
    kind: str,
    where: str,
    whole: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """When it opens a file, and when it reads one."""
    import pyarrow.dataset

    def fails(*_: object, **__: object) -> None:
        raise getattr(pyarrow.lib, kind)("damaged\x1b[2J\nhere")

    path = tmp_path / "whole.parquet"
    path.write_bytes(whole)
    if where == "schema":
        monkeypatch.setattr(pyarrow.dataset, "dataset", fails)
    else:
        from nanwatch.trace.trace_file import Trace

        monkeypatch.setattr(Trace, "_read", fails)
    assert outcome(capsys, "show", str(path)) == 2
