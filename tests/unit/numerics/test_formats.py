"""The table of number formats against torch's own conversions, and the header that is made of it."""

from __future__ import annotations

import pytest
import torch

from nanwatch.numerics.formats import NUMBER_FORMATS

SMALL_FLOATS = [form for form in NUMBER_FORMATS if form.is_float and form.bits <= 16]


@pytest.mark.parametrize("form", SMALL_FLOATS, ids=lambda form: form.name)
def test_a_word_is_worth_what_torch_makes_of_it(form) -> None:
    """Every word without a sign: the number, what is finite, inf and subnormal, and that words grow with numbers."""
    words = torch.arange(1 << (form.bits - form.has_sign_bit)).to(
        torch.uint8 if form.bits == 8 else torch.int16
    )
    values = words.view(getattr(torch, form.name)).double()
    finite = values[: form.largest_word + 1]
    assert finite.tolist() == [form.value_of(word) for word in range(form.largest_word + 1)]
    assert finite.diff().min() > 0
    above = values[form.largest_word + 1 :]
    assert not above.isfinite().any()
    assert above.isinf().tolist() == [form.kind == "ieee" and i == 0 for i in range(len(above))]
    smallest_normal = torch.finfo(getattr(torch, form.name)).smallest_normal
    assert form.smallest_normal_word == (values >= smallest_normal).nonzero()[0]
    assert form.smallest_word == (values > 0).nonzero()[0]
