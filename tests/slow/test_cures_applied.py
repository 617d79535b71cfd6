"""Cures of a model of each family are applied to its source, which runs unwatched in a new process.

`benchmarks/judge_cures.py` judges all models, and its exit status says whether the promises of docs/cures.md hold.
"""

from __future__ import annotations

from cures.judge import broken_promises, judged
from cures.table import CURES, FAMILIES, QUICK_FAMILIES


def test_a_patch_of_each_family_works() -> None:
    """And no cure is told that does not work, of these and of each twelfth other model."""
    families = {name for family, name in FAMILIES.items() if family not in QUICK_FAMILIES}
    quick = {FAMILIES[family] for family in QUICK_FAMILIES}
    names = [
        one.name
        for i, one in enumerate(CURES)
        if one.name in families or (i % 12 == 0 and one.name not in quick)
    ]
    found = judged(*names)
    assert [one["name"] for one in found] == names
    assert broken_promises(found) == []
    assert [one for one in found if one["name"] in families and not one["is_patched"]] == []
