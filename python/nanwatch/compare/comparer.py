"""Comparison of two runs of calls, of models or from traces, and the first pair that leaves the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import hypot, isfinite, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..numerics.readable import dtype_name
from ..trace.comparison import Comparison, Place
from ..util.messages import module_name, plural
from .calls import MOST_VALUES, SUM, CallPair, Errors, ModuleCall, Run, coarsest, errors_between, rows_of_both

# A difference that is this many times larger than what is left of it after the module is one of convention.
_VANISHED = 100.0
_KINDS = ("inputs", "outputs")
# Outputs that are further apart are never equal, in units of the narrowest format. Products of 16 bits are summed in
# float32, those of others in the format itself. Pairs that compute the same stay below 0.5 and 4.
_UNITS_OF_16_BITS, _UNITS = 8, 64
# A difference that rounding of weights explains is within twice the error that the largest such rounding, with random
# signs, makes in a run.
_ROUNDED = 3.0
_MOST_REMARKS = 5
_EPS = {"eps", "epsilon"}  # parts of names, as in rms_norm_eps
# Kind of values, and of which calls.
Event = tuple[str, CallPair]
# Side, and two runs of its model between which the error is noise.
NoiseRuns = Sequence[tuple[int, Run, Run]]


class Noise(NamedTuple):
    """How the noise floor was measured.

    `coarse` is the precision that both sides have at least, and `narrowest` that of their weights too. `runs` are in
    low and in high precision, as `words` say. `shaken` are without and with weights as far off as rounding may be.
    """

    coarse: torch.dtype
    narrowest: torch.dtype
    runs: NoiseRuns
    words: str
    shaken: NoiseRuns = ()

    def floor(self, noise: list[Errors], shaken: list[Errors], of: str, factor: float) -> float:
        """Return the floor by the errors of the less noisy side, and by what shaken weights make of both."""
        eps = torch.finfo(self.coarse).eps
        # float64 is measured by float32, as nothing is more precise.
        scale = eps / torch.finfo(torch.float32).eps if self.coarse is torch.float64 else 1.0
        least = max(eps / 4, scale * min(getattr(errors, of) for errors in noise)) if noise else 4 * eps
        return least + _ROUNDED / factor * hypot(*(getattr(errors, of) for errors in shaken))


class Verdict(NamedTuple):
    """Outcome: whether two runs are equal, and the first module whose inputs agree and whose outputs do not.

    `first` is None where there is none, with the reason in `why`. `where` says where in it the difference begins,
    `likely` what it looks like. `hidden_by` is the 16-bit dtype whose rounding hides a difference of float32 copies.
    """

    comparer: Comparer
    equal: bool | None
    why: str = ""
    first: Place | None = None
    where: str = ""
    likely: Sequence[str] = ()
    remarks: Sequence[str] = ()
    hidden_by: str = ""


@dataclass(eq=False)
class Comparer:
    """Comparison of the calls of A and B, and the search for the first difference.

    A difference has to be `factor` times the floor. `conventions` has the differences that are gone later on, in words,
    by the kind of values and the keys of the calls.
    """

    runs: Sequence[Run]
    pairs: list[CallPair]
    tokens: Tensor | None
    factor: float
    noise: Noise
    conventions: dict[Any, str]
    remarks: list[str]

    def __post_init__(self) -> None:
        self._events = {(kind, pair): self._compare(kind, pair) for pair in self.pairs for kind in _KINDS}

    def result(self, verdict: Verdict) -> Comparison:
        """Return a verdict for users, with the errors of all modules."""
        first, facts, headline = verdict.first, list[tuple[str, str]](), "Equal within the noise floor"
        if not verdict.equal:
            headline = f"No module can be named: {verdict.why}"
        if first is not None:
            errors = first.input_error, first.error
            before, size = ("not comparable" if error is None else f"{error:.2g}" for error in errors)
            copies = f"Equal in {verdict.hidden_by}; the float32 copies differ first in {first.name}, {size}"
            headline = copies if verdict.hidden_by else f"Differ first in {first.name}"
            if first.error is not None and first.limit is not None:
                side = "above" if first.error > first.limit else "within"
                size += f", {side} {self.factor:g} x the floor of {first.limit / self.factor:.2g}"
            facts = [("Input", before), ("Output", size), ("Where", verdict.where)]
        facts += [*(("Looks like", words) for words in verdict.likely), ("Noise", self.noise.words)]
        facts = [(head, words) for head, words in facts if words]
        places = tuple(place for pair in self.pairs if (place := self.place(pair)).error is not None)
        made = f"A made {len(self.runs[0]):,} calls, B {len(self.runs[1]):,}"
        compared = f"{plural(len(places), 'pair')} of module calls ({made})"
        remarks = (*verdict.remarks, *[*dict.fromkeys(self.remarks)][:_MOST_REMARKS])
        return Comparison(verdict.equal, headline, first, tuple(facts), compared, remarks, places)

    def differs(self, event: Event) -> bool:
        """Return whether the inputs or outputs of a pair are above the noise."""
        errors = self._events[event]
        return errors is not None and errors.ratio > self.factor

    def place(self, pair: CallPair) -> Place:
        """Return the errors of a pair, which need not be one of those that were matched."""
        a, b = pair
        before, out = (self._events.get((kind, pair)) or self._compare(kind, pair) for kind in _KINDS)
        place = Place(a.path, b.path, a.class_name, b.class_name, input_error=before and before.total)
        if out is None:
            return place
        limit, largest = self.factor * out.floor, out.largest_difference
        return place._replace(error=out.total, limit=limit, cosine=out.cosine, largest_difference=largest)

    # The search.

    def compare(self) -> Verdict:
        """Go through the events in the order of A until one differs."""
        root = self.pairs[0]
        result = self._events["outputs", root]
        if result is None:
            return Verdict(self, None, "the outputs of the two models have shapes that do not go together")
        if self.differs(("inputs", root)):
            words = "; ".join(self._looks_like(("inputs", root), root))
            return Verdict(self, None, f"the models were not given the same inputs{words and f' ({words})'}")
        last, largest = None, 0.0
        for event in sorted(self._events, key=lambda event: event[1].a.time(event[0])):
            errors = self._events[event]
            if errors is None:
                continue
            if not self.differs(event):
                last = event
            elif words := self._convention(event, errors):
                self.remarks.append(words)
            elif not self.noise.runs and errors.total <= self.factor * largest:
                grown = f"from {largest:.2g} to {errors.total:.2g} at {event[1].name} without a jump"
                why = f"the error grows {grown}, as rounding does, and the floor is not known"
                return Verdict(self, None, why)
            elif last is None:
                why = f"nothing could be compared before {_spell(event)}, which differs"
                return Verdict(self, False, why)
            else:
                pair, where = self._blame(event, last)
                return Verdict(self, False, "", self.place(pair), where, self._looks_like(event, pair))
            largest = max(largest, errors.total)
        # The runs that the noise was measured in may have the fault too.
        narrowest = torch.finfo(self.noise.narrowest)
        units = _UNITS if narrowest.bits > 16 else _UNITS_OF_16_BITS
        if (size := result.total) > units * narrowest.eps:
            apart = f"{size:.2g} apart, more than {units} units of {dtype_name(self.noise.narrowest)}"
            return Verdict(self, False, f"the outputs are {apart}, and what measured the noise is as far off")
        return Verdict(self, True)

    def _convention(self, event: Event, errors: Errors) -> str:
        """Return in words where the difference is gone: at the output of the module or of one around it."""
        kind, pair = event
        key = (kind, *(call.key for call in pair))
        for outer in reversed(self.pairs):
            after = self._events["outputs", outer]
            if after is None or after.ratio > self.factor or errors.total <= _VANISHED * after.total:
                continue
            is_around = outer.a.holds(pair.a) and not self.differs(("inputs", outer))
            if is_around or (outer is pair and kind == "inputs"):
                gone = _spell(("outputs", outer))
                self.conventions[key] = f"{_spell(event)} differs, which is gone at {gone}"
                break
        return self.conventions.get(key, "")

    def _blame(self, event: Event, last: Event) -> tuple[CallPair, str]:
        """Return the innermost calls with the last event that agrees and the first that does not, and where in them."""
        kind, pair = event
        is_fed = self._events["inputs", pair] is not None or not (pair.a.inputs and pair.b.inputs)
        if kind == "outputs" and pair.a.is_leaf and is_fed:
            return pair, ""
        where = f"in its own code, between {_spell(last)}, which agrees, and {_spell(event)}, which does not"
        spans = [sorted((last[1][side].time(last[0]), pair[side].time(kind))) for side in (0, 1)]
        innermost = []
        for run, (start, end) in zip(self.runs, spans, strict=True):
            innermost.append([x for x in run.values() if x.start <= start and x.end >= end][-1])
        return CallPair(*innermost), where

    def _looks_like(self, event: Event, pair: CallPair) -> list[str]:
        """Return in words what may make the difference of an event, for which a pair of calls is blamed."""
        (kind, calls), errors, parts = event, self._events[event], pair.a.parts or pair.b.parts
        words = [] if parts or event == ("inputs", pair) else [*module_differences(pair)]
        if errors is not None and (rows := self._rows(kind, calls, errors.values)) is not None:
            words += _part_of_difference(parts, *rows, self.factor * errors.floor)
            first = calls.a.value(kind, errors.values[0])
            words += shape_of_difference(*rows, errors, () if first is None else first.shape)
        return words

    # The errors of an event.

    def _compare(self, kind: str, pair: CallPair) -> Errors | None:
        """Compare the inputs or the outputs of a pair, or return None where they do not go together."""
        count_a, count_b = (min(len(getattr(call, kind)), MOST_VALUES) for call in pair)
        if kind == "outputs" and count_a == count_b > 1:
            each = [errors for i in range(count_a) if (errors := self._compare_values(kind, pair, (i, i)))]
            if len(each) == count_a:
                return max(each, key=lambda errors: errors.ratio)
        tried = sorted(product(range(count_a), range(count_b)), key=sum)
        main = (errors for values in tried if (errors := self._compare_values(kind, pair, values)))
        # One side may pass hidden and residual apart, the other their sum.
        sums = (self._compare_values(kind, pair, values) for values in ((SUM, 0), (0, SUM)))
        candidates = [errors for errors in (next(main, None), *sums) if errors is not None]
        return min(candidates, key=lambda errors: errors.total, default=None)

    def _compare_values(self, kind: str, pair: CallPair, values: tuple[int, int]) -> Errors | None:
        rows = self._rows(kind, pair, values)
        if rows is None:
            return None
        errors = errors_between(*rows)
        runs = self.noise.runs, self.noise.shaken
        noise, shaken = (self._errors_of(each, kind, pair, values) for each in runs)
        whole, worst = (self.noise.floor(noise, shaken, of, self.factor) for of in ("total", "worst_row"))
        ratio = max(errors.total / whole, errors.worst_row / worst)
        return errors._replace(floor=whole, ratio=ratio, values=values)

    def _errors_of(self, runs: NoiseRuns, kind: str, pair: CallPair, values: tuple[int, int]) -> list[Errors]:
        """Return the errors between the two runs of each side."""
        noise = []
        for side, low, high in runs:
            calls = pair[side].in_run(high), pair[side].in_run(low)
            if rows := self._rows(kind, calls, (values[side], values[side])):
                noise.append(errors_between(*rows))
        return [errors for errors in noise if isfinite(errors.total)]  # a low run may overflow

    def _rows(
        self, kind: str, calls: Sequence[ModuleCall | None], values: tuple[int, int]
    ) -> tuple[Tensor, Tensor] | None:
        sides = zip(calls, values, strict=True)
        a, b = (None if call is None else call.value(kind, index) for call, index in sides)
        return rows_of_both(a, b, self.tokens)


def _part_of_difference(parts: Sequence[ModuleCall], a: Tensor, b: Tensor, limit: float) -> list[str]:
    """Return in words which of the calls beside a fused one differ, unless all do."""
    widths = [call.outputs[0].shape[-1] for call in parts if call.outputs]
    if sum(widths) != a.shape[-1]:
        return []
    columns = zip(parts, a.split(widths, -1), b.split(widths, -1), strict=True)
    off = [module_name(call.path) for call, *both in columns if errors_between(*both).total > limit]
    return [f"in {', '.join(off)} only"] if 0 < len(off) < len(parts) else []


def _spell(event: Event) -> str:
    return f"the {event[0][:-1]} of {event[1].name}"


# Words for a difference.


def shape_of_difference(a: Tensor, b: Tensor, errors: Errors, shape: Sequence[int]) -> list[str]:
    """Return in words what the difference between the rows `a` and `b` of tensors of this shape looks like."""
    difference, distance, floor = b - a, errors.total, errors.floor
    if not (0 < distance < float("inf")):
        return ["non-finite numbers on one side only"] if distance else []
    noise = max(0.05 * distance, 4 * floor)
    size = b.norm().clamp(min=1e-300)
    scale = float((a * b).sum() / (a * a).sum())
    if float((b - scale * a).norm() / size) < noise:
        return [f"a scale: B is {scale:.7g} times A"]
    scales = (a * b).sum(-1, keepdim=True) / (a * a).sum(-1, keepdim=True).clamp(min=1e-300)
    low, high = float(scales.min()), float(scales.max())
    # Another eps makes all tokens smaller, or all larger.
    if float((b - scales * a).norm() / size) < noise and (high < 1 or low > 1):
        return [f"a scale for each token, from {low:.4g} to {high:.4g}: the eps of a norm, or another norm"]
    words = []
    columns = difference.norm(dim=0)
    off = columns > max(1e-3 * float(columns.max()), 2 * floor * float(a.norm(dim=0).max()))
    places = off.nonzero().flatten().tolist()
    if 0 < len(places) <= len(columns) / 2:
        words.append(f"{len(places)} of {len(columns)} columns only, from {places[0]} to {places[-1]}")
    return words + _token_words(errors, shape)


def _token_words(errors: Errors, shape: Sequence[int]) -> list[str]:
    """Return in words at which positions of the sequence a tensor of shape (batch, length, ...) differs."""
    if len(shape) < 3 or shape[1] < 2 or len(errors.rows) != prod(shape[:-1]):
        return []
    by_token = errors.rows.reshape(shape[0], shape[1], -1).amax((0, 2)).to(torch.float64)
    count = len(by_token)
    off = (by_token > max(1e-3 * float(by_token.max()), 8 * errors.floor)).nonzero().flatten().tolist()
    if len(off) == 1:
        return [f"token {off[0]} of {count} only"]
    if off and off[0] > 0 and len(off) == count - off[0]:
        but_first = "all tokens but the first: a mask, positions, or the scale of the attention"
        return [but_first if off[0] == 1 else f"tokens from {off[0]} on only: a mask or positions"]
    return [f"tokens up to {off[-1]} only"] if off and off[-1] < count - 1 else []


def gaps(pair: CallPair) -> dict[str, tuple[str, float]]:
    """Return the parameters and buffers that both modules of a pair have, and do not have alike.

    Each has its difference in words, and the share of its elements that rounding does not explain. Parameters are equal
    in the coarser of their dtypes or not at all.
    """
    apart, tensors_b = dict[str, tuple[str, float]](), pair.b.tensors()
    buffers = () if pair.a.module is None else pair.a.module._buffers
    for name, a in pair.a.tensors().items():
        b, is_buffer = tensors_b.get(name), name in buffers
        if b is None or a.shape != b.shape:
            continue
        coarse = coarsest(a.dtype, b.dtype)
        x, y = (tensor.cpu() if is_buffer else tensor.cpu().to(coarse) for tensor in (a, b))
        if torch.equal(x, y):
            continue
        x, y = x.double(), y.double()
        error = errors_between(x.reshape(1, -1), y.reshape(1, -1)).total
        # A non-finite element is close to its equal, and to what the cast makes so, as the least float32 in a mask.
        is_close = partial(torch.isclose, rtol=torch.finfo(coarse).eps, atol=0.0, equal_nan=True)
        is_rounding = is_close(x, y) | is_close(y, x) | (x.to(coarse) == y.to(coarse))
        is_turned = x.ndim == 2 and x.shape[0] == x.shape[1] and torch.equal(x.t(), y)
        dtypes = "" if a.dtype is b.dtype else f", {dtype_name(a.dtype)} in A and {dtype_name(b.dtype)} in B"
        words = "is transposed" if is_turned else f"is {error:.2g} apart{dtypes}"
        if error:
            beyond = 1.0 - float(is_rounding.double().mean()) if is_buffer else 1.0
            apart[name] = f"its {name} {words}", beyond
    return apart


def module_differences(pair: CallPair) -> dict[str, bool]:
    """Return in words which settings and own tensors the two modules of a pair do not have alike.

    The value is True for a tensor, or the eps of a leaf, that makes modules of equal outputs differ. Modules of two
    kinds or settings may keep a weight in two ways, and a buffer may have been rounded.
    """
    a, b = map(_settings, pair)
    apart = [name for name in a if name in b and a[name] != b[name]]
    settings = {name: f"{name} is {a[name]} in A and {b[name]} in B" for name in apart}
    kinds = {type(call.module).__name__ for call in pair}
    is_one_kind = bool(pair.a.parts or pair.b.parts) or len(kinds) == 1 or kinds == {"Conv1D", "Linear"}
    is_one_kind = is_one_kind and not settings.keys() - {"eps", "training"}
    training = {settings.pop("training"): False} if "training" in settings else {}
    words = {text: name == "eps" and pair.is_leaf for name, text in settings.items()}
    has_bias = [call.module is not None and call.module._parameters.get("bias") is not None for call in pair]
    if pair.is_leaf and len({*has_bias}) > 1:
        words[f"only {'A' if has_bias[0] else 'B'} has a bias"] = False
    return words | {gap: is_one_kind and beyond > 0 for gap, beyond in gaps(pair).values()} | training


def _settings(call: ModuleCall) -> dict[str, bool | int | float | str]:
    attributes = {} if call.module is None or call.parts else vars(call.module)
    plain = {name: x for name, x in attributes.items() if isinstance(x, bool | int | float | str)}
    return {"eps" if _EPS & {*name.split("_")} else name: x for name, x in plain.items()}
