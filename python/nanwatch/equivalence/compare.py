"""`nanwatch.compare`: the first module in which two implementations of one model differ by more than rounding does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics.readable import dtype_name
from ..util.visible import first_few, module_name, spell
from .calls import CallPair
from .comparison import Comparison, spell_error
from .differences import Tokens, are_apart, parameter_differences, stored_differences
from .engine import KINDS, Comparer
from .model_runs import FLOATS, Caller, ModelRuns, rounded_apart
from .state import State


def compare(
    model_a: nn.Module,
    model_b: nn.Module,
    inputs: Any,
    *,
    call_a: Caller | None = None,
    call_b: Caller | None = None,
    tokens: Tensor | None = None,
    factor: float = 8.0,
    most_bytes: int = 1 << 30,
) -> Comparison:
    """Run two implementations of one model on the same inputs, and name the first module that differs.

    Args:
        model_a: the reference.
        model_b: the same weights in another implementation, precision, device or mode.
        inputs: a tuple of positional arguments, a mapping of keyword arguments, or one argument.
        call_a: how to call A, as `lambda model, inputs: model(inputs["input_ids"])`, where `model(inputs)` will not do.
        call_b: the same for B.
        tokens: mask (batch, length) of the tokens that count. Default: a two-dimensional `inputs["attention_mask"]`.
        factor: how many times the noise floor a difference must have.
        most_bytes: memory for copies of tensors, per run. Beyond it rows are kept as sketches of 32 numbers.

    Modules are matched by name, by weights, as parts of a fused projection, else by class, order and values. The noise
    floor of each module is its error against a run of the same model in higher precision, for which the models are
    copied. Models of two precisions are held to the coarser one. The copies of 16-bit models are compared too, in
    float32: a difference that rounding hides is told with `equal_in`. A leaf with another parameter is never equal.

    Neither model is changed, and random states are as before. Gradients are off. Raises what the models raise. The
    result has `to_text()`, `to_json()` and `to_html()`.

    >>> import copy, torch
    >>> from nanwatch import compare
    >>> a = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4, eps=1e-5))
    >>> b = copy.deepcopy(a)
    >>> b[1].eps = 1e-2
    >>> found = compare(a, b, torch.randn(3, 4))
    >>> found.first.module_a, found.likely[0]
    ('1', 'eps is 1e-05 in A and 0.01 in B')
    """
    for name, model in (("model_a", model_a), ("model_b", model_b)):
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name} should be a torch.nn.Module, got {type(model).__name__}")
    if not factor > 1:
        raise ValueError(f"factor should be above 1, the noise floor itself, got {factor}")
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)  # transformers' BatchEncoding among them
        mask = inputs.get("attention_mask")
        tokens = mask if tokens is None and isinstance(mask, Tensor) and mask.ndim == 2 else tokens
    kept_apart = stored_differences(model_a, model_b)
    state = State([model_a, model_b])
    with state.kept():
        a = ModelRuns(model_a, call_a, inputs, state, most_bytes)
        b = ModelRuns(model_b, call_b, inputs, state, most_bytes)
        comparer = _ModelComparer((a, b), Tokens(tokens), factor)
        precise = comparer.compare_copies()
        found = with_copies(comparer.compare(), precise, dtype_name(comparer.coarse))
        found = comparer.with_parameters(found) if found.equal else found
        return comparer.with_stored(found, kept_apart) if kept_apart else found


def with_copies(found: Comparison, precise: Comparison | None, name: str) -> Comparison:
    """Return what the comparison of two models in the dtype `name` and that of their float32 copies say together."""
    if precise is None or found.equal is None:
        return found
    if found.equal and precise.equal is False:
        return replace(precise, equal_in=name)
    if found.equal is False and precise.equal:
        only = f"the float32 copies are equal: look at dtypes, and at the order of what {name} rounds"
        return replace(found, remarks=(*found.remarks, only))
    if found.equal or precise.first is None:
        return found
    if found.first is None or found.first.name != precise.first.name:
        first = found.why if found.first is None else f"{found.first.name}, {spell_error(found.first.error)}"
        return replace(
            precise,
            remarks=(f"this is of float32 copies; in {name} they differ first in {first}", *precise.remarks),
        )
    return replace(found, where=precise.where, likely=precise.likely)


class _ModelComparer(Comparer):
    """Comparison of two models, which can be run in other precisions.

    `are_copies`: they are float32 copies of 16-bit models. What was rounded when these were made adds to the noise.
    """

    def __init__(
        self, models: tuple[ModelRuns, ModelRuns], tokens: Tokens, factor: float, *, are_copies: bool = False
    ) -> None:
        super().__init__(models, tokens, factor)
        self._models = models
        self._are_copies = are_copies
        self.narrowest = max((self.coarse, *(one.stored for one in models)), key=FLOATS.index)

    def compare_copies(self) -> Comparison | None:
        """Compare the float32 copies of 16-bit models. Take over what they show of rounding and of conventions."""
        if torch.finfo(self.coarse).bits > 16:
            return None
        stored = max((one.stored for one in self._models), key=FLOATS.index)
        made = []
        for name, one in zip("AB", self._models, strict=True):
            try:
                made.append(one.copied(torch.float32, stored))
            except Exception as error:  # of the user's code, which may know one precision only
                self._remarks.append(f"{name} did not run in float32: {spell(error)}")
        if len(made) < 2:
            return None
        copies = _ModelComparer((made[0], made[1]), self._tokens, self._factor, are_copies=True)
        comparison = copies.compare()
        self._rounded, self._conventions = copies._rounded, copies._conventions
        return comparison

    def with_parameters(self, found: Comparison) -> Comparison:
        """Return the result for equal outputs, which a parameter or an eps that a leaf has alone makes unequal."""
        where = (
            "in its own parameters or eps; with these inputs the model's output shows no more than rounding"
        )
        pairs = list(dict.fromkeys(pair for _, pair in self._events))
        apart = {pair.a[0].path for pair in pairs if are_apart(*pair.modules)}
        for pair in pairs:
            is_leaf = all(one.is_leaf for one in (*pair.a, *pair.b))
            is_agreed = not any(self._differs((kind, pair)) for kind in KINDS)
            # What makes up for another weight is another module too.
            is_alone = apart == {pair.a[0].path}
            words = parameter_differences(*pair.modules) if is_leaf and (is_agreed or is_alone) else []
            if words:
                return replace(
                    found, equal=False, first=self._module_error(pair), where=where, likely=tuple(words)
                )
        return found

    def with_stored(self, found: Comparison, kept_apart: dict[str, list[str]]) -> Comparison:
        """Return the result with what modules of one path keep apart, the first of which is named where none is."""
        words = [f"{module_name(path)} ({one})" for path, several in kept_apart.items() for one in several]
        remark = f"apart before anything is run: {first_few(words)}"
        found = replace(found, remarks=(*found.remarks, remark))
        pair = next((pair for _, pair in self._events if pair.a[0].path in kept_apart), None)
        if found.equal is not False or found.first is not None or pair is None:
            return found
        likely = tuple(kept_apart[pair.a[0].path])
        return replace(found, first=self._module_error(pair), where=found.why, why="", likely=likely)

    def _measure(self) -> str:
        """Run the models in other precisions. Return in words how the floor was measured."""
        coarse = self.coarse
        low = torch.float32 if coarse is torch.float64 else coarse
        high = torch.float64 if low is torch.float32 else torch.float32
        for number, (side, other) in enumerate((self._models, self._models[::-1])):
            if FLOATS.index(side.dtype) > FLOATS.index(other.dtype):
                continue  # its weights are rounded already
            try:
                self._measured.append((number, side.run_in(low), side.run_in(high)))
            except Exception as error:  # of the user's code, which may know one precision only
                self._remarks.append(f"{'AB'[number]} did not run in {dtype_name(high)}: {spell(error)}")
        measured = " and ".join("AB"[number] for number, _, _ in self._measured)
        if not measured:
            return f"not measured, assumed to be 4 eps of {dtype_name(coarse)}"
        scaled = ", scaled to float64" if coarse is torch.float64 else ""
        return (
            f"rounding error of {measured}, run in {dtype_name(low)} and again in {dtype_name(high)}{scaled}"
        )

    def _match(self) -> list[CallPair]:
        pairs = super()._match()
        for number, keys in enumerate(rounded_apart(pairs, self._models) if self._are_copies else ()):
            if keys:
                side = self._models[number]
                self._rounded.append((number, side.run_in(side.dtype), side.shaken(keys)))
                more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
                name = ".".join(filter(None, keys[0])) + more
                self._floor_words += f"; rounding of {name}, which {'AB'[1 - number]} has not so"
        return pairs
