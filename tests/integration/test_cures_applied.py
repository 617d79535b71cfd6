"""Cures of some families are told, applied to the source by git, and work; tests/slow judges those of the others."""

from __future__ import annotations

from cures.judge import broken_promises, judged
from cures.table import FAMILIES, QUICK_FAMILIES


def test_a_patch_of_some_families_works() -> None:
    names = [FAMILIES[family] for family in QUICK_FAMILIES]
    found = judged(*names)
    assert [one["name"] for one in found] == names
    assert broken_promises(found) == []
    assert [one for one in found if not one["is_patched"]] == []
