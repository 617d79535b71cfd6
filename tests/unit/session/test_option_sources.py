"""Options said without code: in the environment, in a file, and which of them goes first."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from nanwatch.cli.commands import COMMANDS
from nanwatch.cli.run import run_parser
from nanwatch.session.api import DeferredWatch, watch
from nanwatch.session.option_sources import CODE, DEFAULT, VARIABLE, in_force


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which the process is in, and no variable of nanwatch's."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("NANWATCH", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_environment_goes_before_the_code_and_the_code_before_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option has the value of the first of environment, code, file and default that says it."""
    monkeypatch.setenv(VARIABLE, "every=3 gradients=1 include='0,1' on_nonfinite=warn")
    (folder / "nanwatch.toml").write_text("every = 5\nmax_frames = 7\ncounts = true\noutput_dir = 'out'\n")
    (folder / "inside").mkdir()
    monkeypatch.chdir(folder / "inside")
    said = in_force({"every": 4, "max_frames": 9})
    place = str(folder / "nanwatch.toml")
    assert {name: tuple(one) for name, one in said.items() if one.source != DEFAULT} == {
        "every": (3, VARIABLE),
        "gradients": (True, VARIABLE),
        "include": (("0", "1"), VARIABLE),
        "on_nonfinite": ("warn", VARIABLE),
        "max_frames": (9, CODE),
        "counts": (True, place),
        "output_dir": (str(folder / "out"), place),
    }
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    options = watch(model, every=4, max_frames=9)._options
    assert (options.every, options.max_frames, options.counts, options.include) == (3, 9, True, ("0", "1"))
    # A trainer's callback and `nanwatch run` say what they were given, also where that is the default.
    deferred = DeferredWatch({"counts": False, "trace_batches": ()})
    assert (deferred.options["counts"], deferred.options["every"]) == (False, 3)


@pytest.mark.parametrize(
    ("text", "value", "expected"), [("1", 1, 1), ("true", True, 100), ("false", False, 0)]
)
def test_every_n_is_the_same_in_all_places(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, value: int, expected: int
) -> None:
    """In Python, in the environment and on the command line; `folder` has no options of its own."""
    del folder
    flag = vars(run_parser().parse_args(["--updates", text, "train.py"]))["updates"]
    told = [watch(nn.Linear(1, 1), updates=one)._options.updates for one in (value, flag)]
    monkeypatch.setenv(VARIABLE, f"updates={text}")
    assert [*told, watch(nn.Linear(1, 1))._options.updates] == [expected] * 3


def test_pyproject_holds_options_in_a_table_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only names nanwatch as a package is passed over, for the file of a folder above."""
    (folder / "pyproject.toml").write_text("[tool.nanwatch]\nspikes = true\n")
    project = folder / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text("[project]\ndependencies = ['nanwatch']\n")
    monkeypatch.chdir(project)
    assert in_force({})["spikes"] == (True, str(folder / "pyproject.toml"))


@pytest.mark.parametrize(
    ("variable", "file", "message"),
    [
        ("gradients", "", r"NANWATCH_OPTIONS has 'gradients'; write option=value"),
        ("gradient=true", "", r"NANWATCH_OPTIONS: there is no option 'gradient'; close names: gradients"),
        ("every=0", "", r"NANWATCH_OPTIONS: every should be at least 1, got 0"),
        ("every=two", "", r"NANWATCH_OPTIONS: every should be a whole number of at least 1, got 'two'"),
        ("weights=yes", "", r"NANWATCH_OPTIONS: weights should be True or False, got 'yes'"),
        ("on_nonfinite=ignore", "", r"NANWATCH_OPTIONS: on_nonfinite should be .* got 'ignore'"),
        ("trace_batches=1,x", "", r"NANWATCH_OPTIONS: '1,x' should be batch numbers"),
        ("scaler=mine", "", r"NANWATCH_OPTIONS: scaler takes an object, which only code can give"),
        ("include='a", "", r"NANWATCH_OPTIONS=.* cannot be split into words: No closing quotation"),
        ("", "every = 0", r"nanwatch.toml: every should be at least 1, got 0"),
        ("", "every", r"nanwatch.toml is no TOML"),
        ("", "[tool]\nevery = 1", r"nanwatch.toml: there is no option 'tool'"),
    ],
)
def test_what_cannot_be_an_option_is_refused_with_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str, file: str, message: str
) -> None:
    """The error names the place, the value and what is accepted; `nanwatch options` says the same in a line."""
    monkeypatch.setenv(VARIABLE, variable)
    if file:
        (folder / "nanwatch.toml").write_text(file)
    with pytest.raises(ValueError, match=message):
        watch(nn.ReLU())
    assert COMMANDS["options"].run([]) == 2


def test_a_folder_that_is_gone_has_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose folder was removed is watched as before."""
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    assert in_force({})["every"] == (1, DEFAULT)
