"""The functions that write checkpoints, and what a guard is told of each call."""

import inspect
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from nanwatch.instrumentation import saving
from nanwatch.instrumentation.saving import SAVES, Save, Seam


@pytest.fixture
def seen():
    saves: list[Save] = []

    def note(save: Save) -> Any:
        saves.append(save)
        return save.write()

    handle = saving.guard(note, lambda: False)
    yield saves
    handle.remove()


def test_a_guard_sees_what_is_saved_and_where(seen, tmp_path):
    x = torch.ones(2)
    torch.save({"x": x}, tmp_path / "a.pt")
    safetensors.torch.save_file({"x": x}, str(tmp_path / "a.safetensors"))
    assert [save.path for save in seen] == [str(tmp_path / "a.pt"), str(tmp_path / "a.safetensors")]
    assert seen[0].content["x"] is x
    raw = seen[1].content["x"]
    assert raw.data_ptr() == x.data_ptr()
    assert torch.equal(raw, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e5m2, torch.int8], ids=str)
def test_memory_for_safetensors_is_seen_as_its_tensor(seen, tmp_path, dtype):
    x = torch.tensor([[1.0, 2.0, 3.0]]).to(dtype)
    safetensors.torch.save_file({"x": x, "empty": x[:0]}, tmp_path / "a")
    found = seen[0].content["x"]
    if dtype is torch.int8:  # it has no infinities
        assert found is None
    else:
        assert (found.dtype, found.shape, found.tolist()) == (dtype, x.shape, x.tolist())
    assert seen[0].content["empty"] is None


def test_bytes_of_an_older_safetensors_are_seen_as_their_tensor():
    data = np.arange(6, dtype=np.float32)
    spec = {"dtype": "float32", "shape": [2, 3], "data": data.tobytes()}
    assert torch.equal(saving._tensor_of(spec, {}), torch.from_numpy(data).view(2, 3))


@pytest.mark.parametrize(
    ("path", "is_folder", "beside"),
    [
        ("model.safetensors", False, "model.nonfinite.safetensors"),
        ("s3://bucket/run.1/a.ckpt", False, "s3://bucket/run.1/a.nonfinite.ckpt"),
        ("run.1/model", False, "run.1/model.nonfinite"),
        ("step-1.5/", True, "step-1.5.nonfinite"),
    ],
)
def test_the_name_beside_keeps_its_ending(path, is_folder, beside):
    def write(place: object) -> None:
        """Write nothing."""

    seam = Seam("m", "write", "m", "", "place", is_folder=is_folder)
    one = Save(seam, inspect.signature(write).bind(path), write)
    assert one.beside(path) == beside
    assert not one.is_beside
    assert Save(seam, inspect.signature(write).bind(beside), write).is_beside


def test_a_save_past_the_guards_is_not_seen(seen, tmp_path):
    with saving.unguarded(), saving.unguarded():
        torch.save({}, tmp_path / "a.pt")
    torch.save({}, tmp_path / "b.pt")
    assert len(seen) == 1


def test_each_guard_is_called_in_turn(seen, tmp_path):
    order: list[str] = []

    def elsewhere(save: Save) -> Any:
        order.append("second")
        return save.write_to(str(tmp_path / "b.pt"))

    second = saving.guard(elsewhere, lambda: False)
    try:
        torch.save({}, tmp_path / "a.pt")
    finally:
        second.remove()
    assert len(seen) == 1
    assert order == ["second"]
    assert [path.name for path in tmp_path.iterdir()] == ["b.pt"]


def test_a_function_that_is_imported_later_is_guarded(monkeypatch, tmp_path):
    (tmp_path / "late_library.py").write_text("def save(what, where):\n    return what\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(saving, "SAVES", (Seam("late_library", "save", "late", "what", "where"),))
    handle = saving.guard(lambda save: (save.function, save.write()), lambda: False)
    import late_library

    assert late_library.save(3, "a") == ("late", 3)
    handle.remove()
    handle.remove()
    assert late_library.save(3, "a") == 3
    del sys.modules["late_library"]


def test_another_librarys_function_over_ours_stays(monkeypatch):
    library = ModuleType("other_library")
    library.save = original = lambda what, where: what
    monkeypatch.setitem(sys.modules, "other_library", library)
    monkeypatch.setattr(saving, "SAVES", (Seam("other_library", "save", "other", "what", "where"),))
    handle = saving.guard(lambda save: "guarded", lambda: False)
    ours = library.save
    library.save = theirs = lambda what, where: ours(what, where)
    assert library.save(3, "a") == "guarded"
    handle.remove()
    assert library.save is theirs
    assert library.save(3, "a") == original(3, "a") == 3


def test_a_removal_is_left_out_while_a_guard_keeps(monkeypatch):
    library = ModuleType("removing_library")
    removed: list[str] = []
    library.remove = removed.append
    monkeypatch.setitem(sys.modules, "removing_library", library)
    monkeypatch.setattr(saving, "REMOVALS", (Seam("removing_library", "remove"),))
    keeps = True
    handle = saving.guard(Save.write, lambda: keeps)
    library.remove("a")
    keeps = False
    library.remove("b")
    handle.remove()
    assert removed == ["b"]
    assert library.remove == removed.append


@pytest.mark.parametrize("seam", SAVES, ids=lambda seam: f"{seam.module}.{seam.name}")
def test_each_function_has_the_arguments_that_are_looked_for(seam):
    found: Any = pytest.importorskip(seam.module)
    for name in seam.name.split("."):
        found = getattr(found, name)
    assert {seam.content, seam.place} <= set(inspect.signature(found).parameters)
