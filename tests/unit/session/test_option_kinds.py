"""Kinds of options: places that can be written, and what is a sink."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from nanwatch.session.api import DeferredWatch, watch
from nanwatch.session.option_kinds import check_place, check_sinks
from nanwatch.sinks.sink import Sink


@pytest.mark.parametrize("option", ["output_dir", "trace", "sinks"])
@pytest.mark.parametrize(
    "place", ["file/inside", "file/deep/inside", "/proc/nanwatch/inside", "n" * 300 + "/x"]
)
def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path, option: str, place: str) -> None:
    """At once, also where the model comes later, with the path and the reason; nothing is left behind."""
    (tmp_path / "file").write_text("")
    path = tmp_path / place
    given: dict[str, Any] = {option: path}
    for start in (lambda: watch(nn.ReLU(), **given), lambda: DeferredWatch(given)):
        with pytest.raises(ValueError, match=rf"{option} is '{path}', and nothing can be written in"):
            start()
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of options has no shell that expands it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_place("output_dir", "~/out") == tmp_path / "out"


def test_a_place_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    """No folder is made before there is something to write."""
    watch(nn.ReLU(), output_dir=tmp_path / "a" / "b", black_box=False).stop()
    assert not list(tmp_path.iterdir())


def test_one_sink_or_several_of_any_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects stay as they are; both spellings of a folder for TensorBoard are its path, which no `chdir` changes."""
    monkeypatch.chdir(tmp_path)
    sink, run = Sink(), SimpleNamespace(log=print, define_metric=print)
    writer = SimpleNamespace(add_scalar=print, add_text=print)
    assert check_sinks("sinks", sink) == (sink,)
    assert check_sinks("sinks", ()) == ()
    assert check_sinks("sinks", [sink, run, writer, print]) == (sink, run, writer, print)
    assert check_sinks("sinks", ["wandb", "tensorboard:a", Path("b"), "tensorboard"]) == (
        "wandb",
        tmp_path / "a",
        tmp_path / "b",
        tmp_path / "runs" / "nanwatch",
    )


@pytest.mark.parametrize(
    "value", [3, object(), [3], [print, None], SimpleNamespace(on_failure=print), b"tensorboard", Sink]
)
def test_what_is_no_sink_is_refused(value: Any) -> None:
    """The error names what came and what is accepted; a class of sinks is not a function."""
    with pytest.raises(
        TypeError, match=r"sinks should be a nanwatch.Sink, a SummaryWriter of TensorBoard, a "
    ):
        watch(nn.ReLU(), sinks=value)


def test_words_that_name_no_sink_are_refused() -> None:
    """A folder without a name before it is told how to say it, and W&B takes its project from `wandb.init`."""
    for start in (lambda: watch(nn.ReLU(), sinks="runs/a"), lambda: DeferredWatch({"sinks": "runs/a"})):
        with pytest.raises(
            ValueError, match=r"sinks has 'runs/a', and there is no sink 'runs/a'.*tensorboard:FOLDER"
        ):
            start()
    with pytest.raises(ValueError, match=r"the sink wandb takes no 'project'; say that to wandb.init"):
        watch(nn.ReLU(), sinks="wandb:project")
