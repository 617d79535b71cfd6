"""`nanwatch options`: each option in force, and who said it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanwatch.cli.commands import COMMANDS
from nanwatch.session.option_sources import DEFAULT, FIELDS, VARIABLE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which the process is in, and no variable of nanwatch's."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("NANWATCH", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_shows_what_is_in_force(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every option with its value and its source; NANWATCH=0 is the source of `enabled`."""
    monkeypatch.setenv(VARIABLE, "every=3")
    monkeypatch.setenv("NANWATCH", "0")
    assert COMMANDS["options"].run([]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert (lines["every"], lines["max_frames"], lines["enabled"]) == (
        ["3", VARIABLE],
        ["21", DEFAULT],
        ["False", "NANWATCH"],
    )


def test_the_document_has_every_option(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths, patterns and numbers as JSON has them, with the file that said them."""
    (folder / "nanwatch.toml").write_text('output_dir = "out"\ninclude = ["a.*", "b"]\n')
    assert COMMANDS["options"].run(["--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == list(FIELDS)
    place = str(folder / "nanwatch.toml")
    assert document["output_dir"] == {"value": str(folder / "out"), "source": place}
    assert document["include"] == {"value": ["a.*", "b"], "source": place}
    assert document["every"] == {"value": 1, "source": DEFAULT}
