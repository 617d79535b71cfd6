"""Places in source code, as people read them."""

from __future__ import annotations

from nanwatch.util.place import Place


def test_an_installed_package_is_named_without_its_folder() -> None:
    """A file of the user's keeps its path, and columns are not shown."""
    assert Place("/venv/lib/python3.11/site-packages/pack/age.py", 7, (4, 9)).short == "pack/age.py:7"
    assert Place("/home/user/train.py", 7).short == "/home/user/train.py:7"
    assert str(Place("train.py", 7, (4, 9))) == "train.py:7"
