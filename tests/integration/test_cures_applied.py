"""A cure of each family is told, applied to the source by git, and works; all models are judged in tests/slow."""

from __future__ import annotations

from support.cures.judge import judged

FAMILIES = {
    "division": "dice_empty",
    "root": "rmse_exact",
    "logarithm": "log_determinant",
    "exponential": "low_var_kl",
    "angle": "edge_rotation",
    "masked softmax": "masked_log_softmax",
    "mask product": "entropy_masked_vocabulary",
    "one element": "group_std_single",
    "empty mean": "cross_entropy_empty",
    "untaken branch": "where_log2",
    "loss by hand": "distil_kl",
    "half eps": "half_saturation",
    "zero norm": "clip_by_norm_zero",
    "Python number": "label_token_count",
    "indexed loss": "mse_missing_targets",
    "option of a module": "ctc_short_input",
}


def test_a_patch_of_each_family_works() -> None:
    verdicts = {one["name"]: one for one in judged(*FAMILIES.values())}
    assert {
        family: verdicts[name]
        for family, name in FAMILIES.items()
        if not verdicts[name]["is_patched"] or verdicts[name]["faults"] or verdicts[name]["trouble"]
    } == {}
