"""Comparison of recorded runs, as of a trainer and an engine: modules, weights, settings and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..numerics.readable import dtype_name
from ..report.notebook import InNotebook
from ..report.page import page
from ..util.visible import first_few
from .calls import CallPair, ModuleCall, value
from .compare import with_copies
from .comparison import Comparison, ModuleError
from .differences import Errors, settings_apart
from .engine import Comparer, Event
from .matching import CallMatcher
from .model_runs import Runs
from .packed import STRIDE, PackedTokens, block_sizes
from .probability_gap import ProbabilityGap, run_gap
from .recorded_run import RecordedRun, stale
from .results import as_json, as_text, wrapped
from .run_words import growth, which_tokens

# Returns a run of transformers on given tokens in a dtype.
Measure = Callable[[torch.dtype], RecordedRun]
# Log-probabilities that an engine reports are float32, and its sampler may round the logits first.
_SAME_LOGPROB = 1e-3


@dataclass(frozen=True, slots=True)
class EngineComparison(InNotebook):
    """Result of `nanwatch.compare_engine`: A is the trainer, or the engine with other settings; B is the engine.

    `comparison` names the first module. `tokens` says in words which tokens differ there, `depth` how the error grows.
    `settings` are those that are not alike, `stale` the weights of B whose bits A has not, `gap` what all this does to
    the sampled tokens. `engines` are both names with their versions.
    """

    engines: tuple[str, str]
    comparison: Comparison
    tokens: str
    depth: str
    settings: tuple[str, ...]
    stale: tuple[str, ...]
    gap: ProbabilityGap | None
    remarks: tuple[str, ...] = ()

    @property
    def equal(self) -> bool | None:
        """True when no module differs by more than rounding does, no weight is stale and log-probabilities agree."""
        if self.stale or any(one.startswith(_SAMPLER) for one in self.remarks):
            return False
        return self.comparison.equal

    @property
    def first(self) -> ModuleError | None:
        """The first module whose inputs agree and whose outputs do not."""
        return self.comparison.first

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        return as_json(self)

    def to_text(self) -> str:
        """Return the result for people."""
        lines = [f"A: {self.engines[0]}   B: {self.engines[1]}", *self.comparison.to_text().split("\n"), ""]
        lines += [line for head, body in self._facts() for line in wrapped(f"{head}:", body)]
        return as_text(lines, self.remarks)

    def to_html(self) -> str:
        """Return a page that opens offline. Needs `jinja2`; write it as UTF-8."""
        found, engines, is_bad = self.comparison, " | ".join(self.engines), not self.equal
        facts = [*found.facts(), *self._facts(), *(("Note", one) for one in self.remarks)]
        name = "EngineComparison.to_html()"
        return page(name, found.headline, engines, facts, found.sections(), is_bad=is_bad)

    def _facts(self) -> list[tuple[str, str]]:
        facts = {"Tokens": self.tokens, "Depth": self.depth, "Settings": "; ".join(self.settings)}
        facts |= {"Stale": first_few(self.stale), "Gap": str(self.gap or "no token was sampled")}
        return [one for one in facts.items() if one[1]]


_SAMPLER = "the logits agree and the log-probabilities do not"


class _PackedMatcher(CallMatcher):
    """Search that also knows a fused projection by the sizes of its parts: one of them may have another weight."""

    def match(self) -> list[CallPair]:
        """Return the pairs, without leaves of one name that do not the same, as SiLU and SiluAndMul."""
        return [one for one in super().match() if _width(one.a[0]) == _width(one.b[0])]

    def _fused(
        self, ones: Sequence[ModuleCall], others: Sequence[ModuleCall]
    ) -> Iterator[tuple[tuple[ModuleCall, ...], ModuleCall]]:
        yield from super()._fused(ones, others)
        for other in self._left(others):
            sizes, around = block_sizes(other.module), other.path.rpartition(".")[0]
            inside = [one for one in self._left(ones) if one.path.rpartition(".")[0] == around and one.inputs]
            groups = (inside[i : i + len(sizes)] for i in range(len(inside) - len(sizes) + 1) if sizes)
            for group in groups:
                is_one_input = len({id(one.inputs[0]) for one in group}) == 1
                if is_one_input and [one.outputs[0].shape[-1] for one in group if one.outputs] == sizes:
                    yield tuple(group), other
                    break


def _width(call: ModuleCall) -> int:
    """Return the width of what a leaf without a weight is given, or 0."""
    is_plain = call.is_leaf and not call.weight_shape and call.inputs
    return call.inputs[0].shape[-1] if is_plain else 0


class _RunComparer(Comparer):
    """Comparison of two recorded runs. `measure` returns runs of A's weights in another precision, on B's tokens."""

    def __init__(self, a: RecordedRun, b: RecordedRun, measure: Measure, factor: float) -> None:
        super().__init__((a, b), PackedTokens(), factor)
        self._runs = (a, b)
        self._run_in = measure
        self._largest = 0.0
        self.tokens = ""

    def _match(self) -> list[CallPair]:
        a, b = self._runs
        return _PackedMatcher(a.calls, b.calls, self._tokens).match()

    def _measure(self) -> str:
        low = torch.float32 if self.coarse is torch.float64 else self.coarse
        high = torch.float64 if low is torch.float32 else torch.float32
        runs: list[Runs] = [{one.key: one for one in self._run_in(dtype).calls} for dtype in (low, high)]
        self._measured.append((0, runs[0], runs[1]))
        for one in runs[0].values():
            own = super()._noise(self._measured, "outputs", CallPair((one,), (one,)), ((0,), (0,)))
            self._largest = max([self._largest, *(noise.total for noise in own)])
        return f"rounding error of transformers, run in {dtype_name(low)} and again in {dtype_name(high)}"

    def _noise(
        self, measured: Any, kind: str, pair: CallPair, picks: Sequence[tuple[int, ...]]
    ) -> list[Errors]:
        """Return the noise, for a module that transformers has not that of the noisiest module."""
        found = super()._noise(measured, kind, pair, picks)
        is_known = found or not measured or not self._largest
        return found if is_known else [Errors(self._largest, torch.full((1,), self._largest))]

    def _first(self, pairs: list[CallPair]) -> tuple[bool | None, Event | None, Event | None, str]:
        equal, event, last, why = super()._first(pairs)
        if event is not None and last is None:  # both were given the same tokens
            return equal, event, ("inputs", next(pair for pair in pairs if pair.a[0].parent is None)), ""
        return equal, event, last, why

    def _gone(self, event: Event) -> Event | None:
        """Return where a difference is gone: also at the input that A's value is, as of a scaled embedding."""
        (kind, pair), given = event, [one for one in self._events if one[0] == "inputs"]
        for other in given if kind == "outputs" and len(pair.a) == 1 else ():
            seen, inputs = self._events[other], other[1].a[0].inputs
            is_same = seen is not None and inputs and inputs[seen.picks[0][0]] is pair.a[0].outputs[0]
            if is_same and not self._differs(other):
                return other
        return super()._gone(event)

    def _looks_like(self, event: Event, pair: CallPair) -> list[str]:
        seen, errors = self._events[event], self._by_place(event)
        if seen is not None and errors:
            limit = max(self._factor * seen.floor, 1e-3 * max(errors.values()))
            off = [place for place, error in errors.items() if error > limit]
            self.tokens = which_tokens(off, list(errors), self._runs[1])
        return super()._looks_like(event, pair)

    def _module_error(self, pair: CallPair) -> ModuleError:
        along: dict[int, float] = {}
        for place, error in self._by_place(("outputs", pair)).items():
            along[place % STRIDE] = max(along.get(place % STRIDE, 0.0), error)
        tokens = tuple(along.get(at, 0.0) for at in range(1 + max(along, default=0)))
        return replace(super()._module_error(pair), tokens=tokens if len(tokens) > 1 else ())

    def _by_place(self, event: Event) -> dict[int, float]:
        """Return the error of each token that both sides have computed."""
        (kind, pair), seen = event, self._events.get(event)
        kept = [] if seen is None else map(value, (pair.a, pair.b), (kind, kind), seen.picks)
        a, b = [None if one is None else one.places for one in kept] or (None, None)
        if seen is None or a is None or b is None:
            return {}
        return dict(zip(a[torch.isin(a, b)].tolist(), seen.errors.rows.tolist(), strict=False))


def compare_runs(*runs: tuple[RecordedRun, RecordedRun, Measure], factor: float = 8.0) -> EngineComparison:
    """Compare two runs in the places that both have computed with the same tokens before them.

    Each of `runs` is A, B, and a function that returns a run of transformers on B's tokens in a dtype. The second of
    them, for runs in 16 bits, is the same in float32.
    """
    a, b, measure = runs[0]
    remarks: list[str] = []
    settings = tuple(settings_apart(a.settings, b.settings).values())
    gap, off = run_gap(a, b) or (None, 0.0)  # before rows are forgotten
    made = []
    for i, (one, other, measure_one) in enumerate(runs):
        places = _shared_places(one, other, [] if i else remarks)
        one.restrict(places)
        other.restrict(places)
        comparer = _RunComparer(one, other, measure_one, factor)
        made.append((comparer, comparer.compare()))
    (comparer, found), (precise_comparer, precise) = made[0], made[-1]
    if len(made) > 1:
        found = with_copies(found, precise, dtype_name(comparer.coarse))
        comparer = precise_comparer if found.equal_in else comparer
    if found.equal and off > _SAME_LOGPROB:
        remarks.append(f"{_SAMPLER}, by up to {off:.2g}: look at the settings of the sampler")
    likely = (*found.likely, *settings) if found.equal is False else found.likely
    # A cast makes other bits of each weight.
    prints = (a if a.dtype is b.dtype else measure(b.dtype)).prints
    return EngineComparison(
        (a.engine, b.engine), replace(found, likely=likely), comparer.tokens, growth(found.modules), settings,
        tuple(stale(prints, b.prints)), gap, tuple(remarks),
    )  # fmt: skip


def _shared_places(a: RecordedRun, b: RecordedRun, remarks: list[str]) -> Tensor:
    ends, parted = [], []
    for request, both in enumerate(zip(a.tokens, b.tokens, strict=True)):
        length = min(map(len, both))
        ends.append(next((i for i, (x, y) in enumerate(zip(*both, strict=False)) if x != y), length))
        parted += [f"request {request} from position {ends[-1]} on"] * (ends[-1] < length)
    if parted:
        remarks.append(f"A and B have other tokens in {first_few(parted)}, which are not compared")
    ours, theirs = ({one for one in run.steps if one % STRIDE < ends[one // STRIDE]} for run in (a, b))
    if not ours & theirs:
        raise ValueError("the two runs have no token in common that both have computed")
    for name, cached in (("A", theirs - ours), ("B", ours - theirs)):
        if cached:
            remarks.append(
                f"{name} took {len(cached)} tokens from its prefix cache, which are compared where they were computed"
            )
    return torch.tensor(sorted(ours & theirs))
