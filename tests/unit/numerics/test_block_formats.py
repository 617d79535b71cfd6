"""The declaration of the block formats, against the tables of their definitions."""

from __future__ import annotations

import pytest

from nanwatch.numerics.block_formats import BLOCKS_BY_NAME, block_format

# OCP Microscaling Formats v1.0, tables 1 to 3 and 5.3: largest, smallest normal, smallest subnormal number.
ELEMENTS = {
    "mxfp8": (448.0, 2.0**-6, 2.0**-9),
    "mxfp8_e5m2": (57344.0, 2.0**-14, 2.0**-16),
    "mxfp6_e3m2": (28.0, 0.25, 0.0625),
    "mxfp6_e2m3": (7.5, 1.0, 0.125),
    "mxfp4": (6.0, 1.0, 0.5),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_have_the_ends_of_the_definition(name: str) -> None:
    """And blocks of 32 along the axis with a power of two as scale."""
    form = BLOCKS_BY_NAME[name]
    assert form.element.ends == ELEMENTS[name]
    assert (form.rows, form.columns, form.scale) == (1, 32, "float8_e8m0fnu")


def test_each_word_of_four_bits_is_the_number_of_the_definition() -> None:
    """No word of it is nan or inf."""
    element = BLOCKS_BY_NAME["nvfp4"].element
    assert [element.value_of(word) for word in range(element.largest_word + 1)] == [
        0,
        0.5,
        1,
        1.5,
        2,
        3,
        4,
        6,
    ]


def test_an_unknown_format_is_an_error_that_names_the_known_ones() -> None:
    """With the name of the function that was called."""
    with pytest.raises(ValueError, match=r"would_fit got the format 'mxfp9'; accepted are mxfp8, .*, nvfp4"):
        block_format("mxfp9", "would_fit")
