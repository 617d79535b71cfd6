"""`nanwatch compare --engine`: prompts, arguments, and errors in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanwatch.cli import engine
from nanwatch.cli.commands import UseError
from nanwatch.cli.equivalence import compare_main


def test_prompts_are_text_or_token_ids(tmp_path: Path) -> None:
    """One in each line that is not empty; a bracket alone makes no ids."""
    file = tmp_path / "prompts.txt"
    file.write_text("[5, 17, 3]\n\nWhat is 2 + 2?\n[a] citation\n")
    assert engine.read_prompts(file) == [[5, 17, 3], "What is 2 + 2?", "[a] citation"]
    for text in ("[1, -2]", "\n"):
        file.write_text(text)
        with pytest.raises(UseError, match="token ids"):
            engine.read_prompts(file)


def test_arguments_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values are JSON where they can be, words else. The status is that of `nanwatch compare`."""
    asked: dict[str, Any] = {}

    class Found:
        equal = None

        def to_text(self) -> str:
            return "the result"

        to_html = to_text

    def compare_engine(**kwargs: Any) -> Found:
        asked.update(kwargs)
        return Found()

    monkeypatch.setattr(engine, "compare_engine", compare_engine)
    file = tmp_path / "prompts.txt"
    file.write_text("[5]\n")
    given = [
        "model",
        str(file),
        "--option",
        "max_num_seqs=1",
        "dtype=bfloat16",
        "--against",
        "enforce_eager=false",
    ]
    assert compare_main(["--engine", "vllm", *given]) == 2
    assert (asked["model"], asked["prompts"], asked["engine"]) == ("model", [[5]], "vllm")
    assert asked["options"] == {"max_num_seqs": 1, "dtype": "bfloat16"}
    assert asked["against"] == {"enforce_eager": False}
    assert not {"engine_python", "dtype", "json"} & asked.keys()
    assert capsys.readouterr().out == "the result\n"


def test_a_folder_without_a_model_is_an_error_of_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what the folder should have."""
    (tmp_path / "p.txt").write_text("[5]\n")
    assert compare_main(["--engine=vllm", str(tmp_path), str(tmp_path / "p.txt")]) == 2
    assert "config.json" in capsys.readouterr().err
