"""Cures of some families are told, applied to the source by git, and work; tests/slow judges those of all models."""

from __future__ import annotations

from cures.judge import judged
from cures.table import FAMILIES


def test_a_patch_of_some_families_works() -> None:
    names = [FAMILIES[family] for family in ("division", "logarithm", "masked softmax", "loss by hand")]
    found = judged(*names)
    assert [one["name"] for one in found] == names
    assert [one for one in found if not one["is_patched"] or one["faults"] or one["trouble"]] == []
