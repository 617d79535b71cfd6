"""What a re-run must not do: act outside the process, or take what is given once."""

from __future__ import annotations

import io
import itertools
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanwatch.diagnosis.outside import GivesOnce, NotRepeatableError, allowed, is_refused, refused, repeatable


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda folder: (folder / "a").write_text(""), "opens"),
        (lambda folder: (folder / "b").mkdir(), "os.mkdir"),
        (lambda folder: (folder / "there").unlink(), "os.remove"),
        (lambda folder: (folder / "there").rename(folder / "c"), "os.rename"),
    ],
)
def test_what_outlasts_the_process_is_refused_before_it_happens(
    tmp_path: Path, act: Callable[[Path], Any], words: str
) -> None:
    """With the line of the program; reading is allowed, and so is all in a block of nanwatch's own, or elsewhere."""
    (tmp_path / "there").write_text("x")
    with refused():
        with pytest.raises(
            NotRepeatableError, match=rf"line \d+ of .*test_outside.py acts outside .*{words}"
        ):
            act(tmp_path)
        assert [one.name for one in tmp_path.iterdir()] == ["there"]
        assert (tmp_path / "there").read_text() == "x"
        with allowed():
            assert not is_refused()
        other: list[bool] = []
        thread = threading.Thread(target=lambda: other.append(is_refused()))
        thread.start()
        thread.join()
        assert (is_refused(), other) == (True, [False])
    act(tmp_path)
    assert not is_refused()


@pytest.mark.parametrize(
    "value",
    [(i for i in [1]), queue.Queue(), map(abs, [1]), itertools.chain([1])],
    ids=lambda one: type(one).__name__,
)  # fmt: skip
def test_what_gives_each_value_once_has_a_stand_in(value: Any) -> None:
    """Which refuses to be read, in words."""
    stand_in = repeatable(value)
    assert isinstance(stand_in, GivesOnce)
    with pytest.raises(
        NotRepeatableError, match=f"takes a value from a {type(value).__name__}, which gives each"
    ):
        next(stand_in)
    with pytest.raises(NotRepeatableError):
        stand_in.get()


@pytest.mark.parametrize("value", [[1], iter([1]), itertools.count(), io.StringIO("a"), io.BytesIO(b"a"), 3])
def test_what_can_be_had_again_stays(value: Any) -> None:
    assert repeatable(value) is value


def test_inside_a_tuple_only_what_gives_once_is_exchanged(tmp_path: Path) -> None:
    """A file says of itself what it is, and takes and gives nothing."""
    with (tmp_path / "log").open("w") as file:
        same, stand_in = repeatable(([1], file))
        assert same == [1]
        assert (stand_in.name, stand_in.mode, stand_in.closed) == (file.name, "w", False)
        for act in (lambda: stand_in.write("x"), lambda: stand_in.read(), lambda: list(stand_in)):
            with pytest.raises(NotRepeatableError):
                act()
    assert (tmp_path / "log").read_text() == ""
    plain = ([1], 2)
    assert repeatable(plain) is plain
