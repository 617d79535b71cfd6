"""Scripts run in this process, and options that stand behind them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from nanwatch.cli.script import add_script, check_script, misplaced_hint, run_script


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="nanwatch run")
    add_script(made)
    made.add_argument("--every")
    made.add_argument("--output-dir")
    return made


def test_all_behind_the_script_is_its_own() -> None:
    """Also what looks like an option of the command."""
    found = parser().parse_args(["--every", "3", "train.py", "--every", "5", "-m", "x"])
    assert (found.target, found.every, found.m, found.arguments) == (
        "train.py",
        "3",
        False,
        ["--every", "5", "-m", "x"],
    )


def test_a_hint_names_options_that_the_script_does_not(tmp_path: Path) -> None:
    """One that its text names, with a dash or an underscore, is meant for it; of a module nothing is known."""
    script = tmp_path / "train.py"
    script.write_text("parser.add_argument('--lr'); args.output_dir")
    hint = misplaced_hint(parser(), str(script), ["--every=3", "--output-dir", "x", "--lr", "1", "--help"])
    assert hint.startswith(
        "the script gets --every, which it does not name; options of nanwatch run go before"
    )
    assert misplaced_hint(parser(), str(script), ["--output-dir", "x"]) == ""
    assert misplaced_hint(parser(), "package.train", ["--every=3"]) == ""


def test_a_script_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"there is no script 'train'; a module is run with -m"):
        check_script("train", is_module=False)
    check_script("train", is_module=True)


def test_a_script_finds_itself_as_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its arguments and its folder, and also after it has raised, as its threads and atexit functions need it."""
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(__name__, sys.argv[1:], sys.path[0])\nraise KeyError('mine')\n")
    with pytest.raises(KeyError, match="mine"):
        run_script(str(script), ["--lr", "1"], is_module=False)
    assert capsys.readouterr().out == f"__main__ ['--lr', '1'] {tmp_path}\n"
    assert (sys.argv[1:], sys.path[0]) == (["--lr", "1"], str(tmp_path))
    assert sys.modules["__main__"].__file__ == str(script)
