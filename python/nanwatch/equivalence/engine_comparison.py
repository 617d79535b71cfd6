"""Comparison of recorded runs, as of a trainer and an engine: modules, weights, settings and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..numerics.readable import dtype_name
from ..report.notebook import InNotebook
from ..report.page import TEXT, Table, page
from .calls import CallPair, ModuleCall, value
from .compare import with_copies
from .comparison import Comparison, ModuleError
from .differences import Errors
from .engine import Comparer, Event
from .matching import CallMatcher
from .model_runs import Runs
from .packed import STRIDE, PackedTokens, block_sizes
from .probability_gap import ProbabilityGap
from .recorded_run import RecordedRun, stale
from .results import as_json, as_text, wrapped
from .run_gap import run_gap
from .run_words import growth, settings_apart, which_tokens

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
        for head, body in self._facts():
            lines += wrapped(f"{head}:", body)
        return as_text(lines, self.remarks)

    def to_html(self) -> str:
        """Return a page that opens offline. Needs `jinja2`; write it as UTF-8."""
        found, facts = self.comparison, [*self._facts(), *(("Note", one) for one in self.remarks)]
        sections = found.sections()
        if self.stale:
            rows = [[one] for one in self.stale]
            sections.append(
                Table("stale", "Stale weights", {"weight of B": TEXT}, rows, "Other bits than in A.")
            )
        is_bad = not self.equal
        return page(
            "EngineComparison.to_html()", found.headline, " | ".join(self.engines), [*found.facts(), *facts], sections,
            is_bad=is_bad,
        )  # fmt: skip

    def _facts(self) -> list[tuple[str, str]]:
        facts = [("Tokens", self.tokens), ("Depth", self.depth), ("Settings", "; ".join(self.settings))]
        more = f" and {len(self.stale) - 4} more" if len(self.stale) > 4 else ""
        facts.append(("Stale", ", ".join(self.stale[:4]) + more))
        return [
            *((head, body) for head, body in facts if body),
            ("Gap", str(self.gap or "no token was sampled")),
        ]


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
        self._largest: float | None = None

    def _match(self) -> list[CallPair]:
        a, b = self._runs
        return _PackedMatcher(a.calls, b.calls, self._tokens).match()

    def _measure(self) -> str:
        low = torch.float32 if self.coarse is torch.float64 else self.coarse
        high = torch.float64 if low is torch.float32 else torch.float32
        runs: list[Runs] = [{one.key: one for one in self._run_in(dtype).calls} for dtype in (low, high)]
        self._measured.append((0, runs[0], runs[1]))
        self._largest = max((self._own_noise(key) for key in runs[0]), default=None)
        return f"rounding error of transformers, run in {dtype_name(low)} and again in {dtype_name(high)}"

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

    def _own_noise(self, key: tuple[str, int]) -> float:
        _, low, high = self._measured[0]
        pair = CallPair((low[key],), (low[key],))
        found = super()._noise([(0, low, high)], "outputs", pair, ((0,), (0,)))
        return max((one.total for one in found), default=0.0)

    def _noise(
        self, measured: Any, kind: str, pair: CallPair, picks: Sequence[tuple[int, ...]]
    ) -> list[Errors]:
        """Return the noise, for a module that transformers has not that of the noisiest module."""
        found = super()._noise(measured, kind, pair, picks)
        if not found and measured and self._largest is not None:
            return [Errors(self._largest, torch.full((1,), self._largest))]
        return found

    def _module_error(self, pair: CallPair) -> ModuleError:
        found, errors = super()._module_error(pair), self.errors_by_place(("outputs", pair))
        if not errors:
            return found
        along = [0.0] * (1 + max(place % STRIDE for place in errors))
        for place, error in errors.items():
            along[place % STRIDE] = max(along[place % STRIDE], error)
        return replace(found, tokens=tuple(along) if len(along) > 1 else ())

    def errors_by_place(self, event: Event) -> dict[int, float]:
        """Return the error of each token that both sides have computed."""
        seen = self._events.get(event)
        if seen is None:
            return {}
        kept = [
            value(side, event[0], pick)
            for side, pick in zip((event[1].a, event[1].b), seen.picks, strict=True)
        ]
        a, b = (None if one is None else one.places for one in kept)
        if a is None or b is None:
            return {}
        return dict(zip(a[torch.isin(a, b)].tolist(), seen.errors.rows.tolist(), strict=False))

    def tokens_of_first(self, found: Comparison) -> str:
        """Return in words which tokens differ at the first event beyond the floor."""
        if found.first is None:
            return ""
        _, event, _, _ = self._first(list(dict.fromkeys(pair for _, pair in self._events)))
        seen = None if event is None else self._events[event]
        if event is None or seen is None:
            return ""
        errors = self.errors_by_place(event)
        limit = max(self._factor * seen.floor, 1e-3 * max(errors.values(), default=0.0))
        return which_tokens(
            [one for one, error in errors.items() if error > limit], list(errors), self._runs[1]
        )


def compare_runs(
    a: RecordedRun,
    b: RecordedRun,
    measure: Measure,
    *,
    factor: float = 8.0,
    copies: Callable[[], tuple[RecordedRun, RecordedRun, Measure]] | None = None,
) -> EngineComparison:
    """Compare two runs in the places that both have computed with the same tokens before them.

    `measure` returns a run of transformers on B's tokens in a dtype. `copies` returns the same three in float32.
    """
    remarks: list[str] = []
    settings = settings_apart(a.settings, b.settings)
    gap = run_gap(a, b)  # before rows are forgotten
    comparer, found = _compared(a, b, measure, factor, remarks)
    if copies is not None:
        precise_comparer, precise = _compared(*copies(), factor, [])
        joined = with_copies(found, precise, dtype_name(comparer.coarse))
        comparer, found = (precise_comparer if joined.equal_in else comparer), joined
    # A cast makes other bits of each weight.
    off = stale((a if a.dtype is b.dtype else measure(b.dtype)).prints, b.prints)
    if found.equal and gap is not None and gap[1] > _SAME_LOGPROB:
        remarks.append(f"{_SAMPLER}, by up to {gap[1]:.2g}: look at the settings of the sampler")
    found = replace(found, likely=(*found.likely, *settings)) if found.equal is False else found
    return EngineComparison(
        (a.engine, b.engine), found, comparer.tokens_of_first(found), growth(found.modules), tuple(settings),
        tuple(off), None if gap is None else gap[0], tuple(remarks),
    )  # fmt: skip


def _compared(
    a: RecordedRun,
    b: RecordedRun,
    measure: Measure,
    factor: float,
    remarks: list[str],
) -> tuple[_RunComparer, Comparison]:
    places = _shared_places(a, b, remarks)
    a.restrict(places)
    b.restrict(places)
    comparer = _RunComparer(a, b, measure, factor)
    return comparer, comparer.compare()


def _computed(run: RecordedRun) -> Tensor:
    """Return the places that a run has computed: those of the call with most of them."""
    kept = [one.places for call in run.calls for one in call.outputs if one.places is not None]
    if not kept:
        raise ValueError(f"{run.engine} recorded no tensor with a row for each token")
    return max(kept, key=len)


def _shared_places(a: RecordedRun, b: RecordedRun, remarks: list[str]) -> Tensor:
    ours, theirs = _computed(a), _computed(b)
    both = ours[torch.isin(ours, theirs)]
    end = {}
    for request, (one, other) in enumerate(zip(a.tokens, b.tokens, strict=True)):
        same = next(
            (i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other))
        )
        end[request] = same
        if same < min(len(one), len(other)):
            remarks.append(
                f"the tokens of request {request} part at position {same}; later ones are not compared"
            )
    both = torch.tensor([place for place in both.tolist() if place % STRIDE < end.get(place // STRIDE, 0)])
    if not len(both):
        raise ValueError("the two runs have no token in common that both have computed")
    known = {*theirs.tolist()}
    # The last sampled token is never computed.
    ends = {request: min(same, len(b.tokens[request]) - 1) for request, same in end.items()}
    cached = sum(place % STRIDE < ends[place // STRIDE] and place not in known for place in ours.tolist())
    if cached:
        remarks.append(
            f"B took {cached} tokens from its prefix cache, which are compared where they were computed"
        )
    return both
