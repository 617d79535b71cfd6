"""Weights that grew most or are far above their siblings, the same weight of other layers."""

from __future__ import annotations

import pytest

from nanwatch.history.suspicion import Key, apart_from_siblings, grown_most

LAYERS: dict[Key, float] = {(f"layers.{layer}.mlp", "weight"): 1.0 + layer / 10 for layer in range(5)}


@pytest.mark.parametrize(("largest", "is_apart"), [(7.9 * 1.15, False), (8.1 * 1.15, True)])
def test_a_weight_is_apart_from_eight_times_the_median_of_its_siblings_on(
    largest: float, is_apart: bool
) -> None:
    """The median is that of the others, 1.15, and the pattern names them all."""
    key = ("layers.4.mlp", "weight")
    found = list(apart_from_siblings({**LAYERS, key: largest}))
    assert [(one[1], one[2]) for one in found] == [(key, "layers.*.mlp")] * is_apart


def test_three_layers_are_too_few_and_other_labels_are_no_siblings() -> None:
    """Three values have no middle, and a bias is no weight."""
    few: dict[Key, float] = {(f"layers.{layer}", "weight"): 1.0 for layer in range(2)}
    others: dict[Key, float] = {(f"layers.{layer}", "bias"): 1.0 for layer in range(2)}
    assert not list(apart_from_siblings({**few, **others, ("layers.2", "weight"): 1e6}))


def test_growth_counts_from_a_tenth_on() -> None:
    """A bias grows from 0 by any factor; the largest growth is named, from eight times on."""
    first: dict[Key, float] = {("a", "bias"): 1e-9, ("b", "weight"): 1.0, ("c", "weight"): 2.0}
    assert grown_most(first, {("a", "bias"): 0.79, ("b", "weight"): 7.9, ("c", "weight"): 2.0}) is None
    assert grown_most(first, {("a", "bias"): 0.81, ("b", "weight"): 8.2, ("c", "weight"): 2.0}) == (
        "b",
        "weight",
    )
    assert grown_most({}, {}) is None
