"""What the source says of a value: that it counts something, that it has no sign."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nanwatch.diagnosis.patching.meanings import bounds_of, is_count, is_nonnegative, words
from support.source_site import returned


@pytest.mark.parametrize(
    ("name", "expected"),
    [("num_tokens", {"num", "tokens", "token"}), ("nValid", {"n", "valid"}), ("numerator", {"numerator"}),
     ("HTTPCounts", {"http", "counts", "count"})],
)  # fmt: skip
def test_names_are_split_into_whole_words(name: str, expected: set[str]) -> None:
    """In snake_case and camelCase, plurals in both forms."""
    assert words(name) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_tokens", True),
        ("numerator", False),
        ("self.n_valid", True),
        ("x.shape[0]", True),
        ("(x > 0).sum()", True),
        ("x.numel()", True),
        ("x.count_nonzero().clamp(min=1)", True),
        ("x.mean()", False),
        ("count - 1", True),
        ("x.exp()", False),
    ],
)
def test_a_count_is_known_by_name_or_operation(tmp_path: Path, text: str, expected: bool) -> None:
    site, value = returned(f"count = (x > 0).sum()\n{text}", tmp_path)
    assert is_count(site, value) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x * x", True),
        ("x * y", False),
        ("x ** 2", True),
        ("x ** 3", False),
        ("x.norm(dim=-1).sum()", True),
        ("x.exp() + y.square()", True),
        ("x.exp() - y.square()", False),
        ("torch.where(x > 0, x.abs(), y.abs())", True),
        ("x.clamp(min=0)", True),
        ("x.clamp(min=-1)", False),
        ("x.clamp(max=1)", False),
        ("square", True),
        ("mask", True),
        ("x", False),
        ("0.5", True),
        ("-0.5", False),
        ("x.std()[0]", True),
        ("(x == y).float()", True),
    ],
)
def test_a_value_without_a_sign_is_known(tmp_path: Path, text: str, expected: bool) -> None:
    """By its operations and by what its names were made of."""
    site, value = returned(f"square = x.square()\n{text}", tmp_path)
    assert is_nonnegative(site, value) == expected


def test_bounds_of_a_clamp(tmp_path: Path) -> None:
    """By place and by name; of nothing else."""
    for text, expected in (("x.clamp(0, max=y)", {"min": "0", "max": "y"}), ("x.clamp_min(2)", {"min": "2"})):
        site, value = returned(text, tmp_path)
        found = bounds_of(site, value)
        assert found is not None
        assert (ast.unparse(found[0]), {name: ast.unparse(x) for name, x in found[1].items()}) == (
            "x",
            expected,
        )
    site, value = returned("x.exp()", tmp_path)
    assert bounds_of(site, value) is None
