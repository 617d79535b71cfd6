"""`nanwatch.compare`: the first module in which two implementations of one model differ by more than rounding does."""

from __future__ import annotations

import copy
import json
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..instrumentation.slot import TemporaryWrapper, attached
from ..numerics.readable import dtype_name
from ..recording.walk import call_leaves, leaves
from ..util.modules import each_module, each_parameter
from ..util.reading import plain
from ..util.visible import module_name, spell, visible
from .matching import Call, Matcher, Pair, weight_of
from .sketches import (
    Errors,
    Kept,
    Store,
    Tokens,
    by_token,
    relative_errors,
    shape_of_difference,
    side_by_side,
    total,
)
from .state import State

Caller = Callable[[nn.Module, Any], Any]
# Leaves of a call's inputs or outputs that are tried against those of the other side.
_LEAVES = 4
# A difference that is this many times larger than what is left of it after the module is one of convention.
_VANISHED = 100.0
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # by precision


@dataclass(frozen=True, slots=True)
class ModuleError:
    """Relative errors of a module's input and output between the two models, and the noise floor of the output.

    `module_b` is empty where B has the module in parts or A has several in one: then `module_a` names all. An error is
    None where the tensors could not be compared. `tokens` are the errors by position in the sequence.
    """

    module_a: str
    module_b: str
    class_a: str
    class_b: str
    input_error: float | None
    error: float | None
    floor: float
    tokens: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """Both names in words."""
        one, other = _named(self.module_a, self.class_a), _named(self.module_b, self.class_b)
        return one if one == other else f"{one} | {other}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `nanwatch.compare`.

    `equal` is True when no difference is above the noise floor, False when one is, and None when nothing could be said.
    `first` is the first module whose inputs agree and whose outputs do not, or None when no module can be named, with
    the reason in `why`. `where` says where in it the difference begins, `likely` what it looks like. `modules` has all
    compared modules in the order of their calls in A. `floor` says how the noise floor was measured.
    """

    equal: bool | None
    first: ModuleError | None
    where: str
    likely: tuple[str, ...]
    why: str
    floor: str
    factor: float
    calls_a: int
    calls_b: int
    modules: tuple[ModuleError, ...]
    remarks: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        return json.dumps(plain(self), indent=2)

    def to_text(self) -> str:
        """Return the result for people."""
        amount = f"{len(self.modules):,} of {self.calls_a:,} module calls compared with {self.calls_b:,}"
        if self.equal:
            lines = [f"Equal within the noise floor: {amount}."]
        elif self.first is None:
            lines = [f"No module can be named: {self.why}.", "", f"Compared:   {amount}"]
        else:
            found = self.first
            lines = [f"Differ first in {found.name}.", ""]
            lines += [
                f"Input:      {_number(found.input_error)} apart",
                f"Output:     {_number(found.error)} apart",
            ]
            lines += [f"Floor:      {_number(found.floor)}, of which {self.factor:g} times are allowed"]
            lines += (
                textwrap.wrap(f"Where:      {self.where}", 100, subsequent_indent=" " * 12)
                if self.where
                else []
            )
            for one in self.likely:
                lines += textwrap.wrap(f"Looks like: {one}", 100, subsequent_indent=" " * 12)
            lines += [f"Compared:   {amount}"]
        lines += [f"Noise:      {self.floor}"]
        lines += ["", *(f"Note: {remark}" for remark in self.remarks)] if self.remarks else []
        return "\n".join(map(visible, lines))


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
        tokens: mask of shape (batch, length) of the tokens that count, to leave out padding. By default `inputs` is
            searched for a two-dimensional `attention_mask`.
        factor: how many times the noise floor a difference must have.
        most_bytes: memory for copies of tensors, per run. Beyond it rows are kept as sketches of 32 numbers.

    Modules are matched by name, by weights, as parts of a fused projection, else by class, order and values. The noise
    floor of each module is its error against a run of the same model in higher precision, for which the models are
    copied. Models of two precisions are held to the coarser one.

    Neither model is changed, and random states are as before. Gradients are off. Raises what the models raise.

    >>> import copy
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
    if tokens is None and isinstance(inputs, Mapping):
        mask = inputs.get("attention_mask")
        tokens = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
    state = State([model_a, model_b])
    with state.kept():
        sides = (
            _Side(model_a, call_a, inputs, state, most_bytes),
            _Side(model_b, call_b, inputs, state, most_bytes),
        )
        return _Comparer(sides, Tokens(tokens), factor).compare()


class _Wrapper(TemporaryWrapper):
    """Wrapper that records the calls of its module in the thread that created it."""

    def __init__(self, module: nn.Module, path: str, log: _Log) -> None:
        super().__init__(module)
        self._path = path
        self._log = log

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        if is_compiling() or threading.get_ident() != self._log.thread:
            return self.run_inner(module, args, kwargs)
        call = self._log.begin(module, self._path, args, kwargs)
        try:
            result = self.run_inner(module, args, kwargs)
        finally:
            self._log.inside.pop()
        return self._log.end(call, result)


class _Log:
    """Calls of one run, those of the latest call of the model last."""

    def __init__(self, store: Store) -> None:
        self.calls: list[Call] = []
        self.inside: list[Call] = []
        self.thread = threading.get_ident()
        self._store = store
        self._clock = 0
        self._occurrences: Counter[str] = Counter()

    def begin(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        self._clock += 1
        parent = self.inside[-1] if self.inside else None
        if parent is not None:
            parent.is_leaf = False
        call = Call(path, type(module).__name__, module, parent, self._clock, self._occurrences[path])
        self._occurrences[path] += 1
        call.inputs = self._keep(call_leaves(args, kwargs))
        self.inside.append(call)
        return call

    def end(self, call: Call, result: Any) -> Any:
        self._clock += 1
        call.end = self._clock
        call.outputs = self._keep(leaves(result, "output"))
        self.calls.append(call)
        return result

    def _keep(self, found: list[tuple[str, Any]]) -> list[tuple[str, Kept]]:
        return [
            (label, self._store.keep(x))
            for label, x in found
            if isinstance(x, Tensor)
            and x.numel()
            and x.layout is torch.strided
            and x.dtype is not torch.bool
            and not x.is_meta
        ]


class _Side:
    """One of the two models, and how to run it."""

    def __init__(
        self, model: nn.Module, call: Caller | None, inputs: Any, state: State, most_bytes: int
    ) -> None:
        self._model = model
        self._call = _call if call is None else call
        self._inputs = inputs
        self._state = state
        self._most_bytes = most_bytes
        self.calls = self._run(model, None)
        dtypes = Counter(
            kept.rows.dtype for one in self.calls for _, kept in one.outputs if kept.rows.dtype in _FLOATS
        )
        self.dtype = dtypes.most_common(1)[0][0] if dtypes else torch.float32

    def run_in(self, dtype: torch.dtype) -> dict[tuple[str, int], Call]:
        """Return the calls of a copy in this dtype, by path and occurrence."""
        calls = self._run(copy.deepcopy(self._model).to(dtype), dtype)
        return {(one.path, one.occurrence): one for one in calls}

    def _run(self, model: nn.Module, dtype: torch.dtype | None) -> list[Call]:
        self._state.restore()
        log = _Log(Store(self._most_bytes))
        device = next((x.device for x in each_parameter(model)), None)
        inputs = _moved(self._inputs, device, dtype)
        with torch.no_grad(), attached(_Wrapper(module, path, log) for path, module in each_module(model)):
            self._call(model, inputs)
        roots = [one for one in log.calls if one.parent is None]
        if not roots:
            raise ValueError(f"no module of the {type(model).__name__} was called: see call_a and call_b")
        # A warm-up comes first.
        return sorted(
            (one for one in log.calls if one is roots[-1] or roots[-1].holds(one)), key=lambda one: one.start
        )


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _moved(value: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Return inputs on the model's device. Floating ones are cast to `dtype` where it is given."""
    if isinstance(value, Tensor):
        return value.detach().clone().to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, Mapping):
        return {key: _moved(one, device, dtype) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_moved(one, device, dtype) for one in value)
    return value


@dataclass(frozen=True)
class _Seen:
    """Comparison of a pair's input or output."""

    errors: Errors
    floor: float
    ratio: float
    values: tuple[Tensor, Tensor]
    shape: tuple[int, ...]


_Runs = dict[tuple[str, int], Call]


class _Comparer:
    """Search for the first module that differs."""

    def __init__(self, sides: tuple[_Side, _Side], tokens: Tokens, factor: float) -> None:
        self._a, self._b = sides
        self._tokens = tokens
        self._factor = factor
        self._coarse = max(self._a.dtype, self._b.dtype, key=_FLOATS.index)
        self._remarks: list[str] = []
        self._floor_text = ""
        # Runs in low and high precision of the sides that were measured: 0 for A, 1 for B.
        self._measured: list[tuple[int, _Runs, _Runs]] = []
        self._scale = 1.0

    def compare(self) -> Comparison:
        self._measure()
        pairs = Matcher(self._a.calls, self._b.calls, self._tokens).match()
        ins = {pair: self._see(pair, "inputs") for pair in pairs}
        outs = {pair: self._see(pair, "outputs") for pair in pairs}
        found = _Search(pairs, ins, outs, self._factor)
        equal, first, where, why = found.first()
        rows = {pair: _module_error(pair, ins[pair], outs[pair]) for pair in pairs}
        words: tuple[str, ...] = ()
        if first is not None:
            words = tuple(_likely(first, found.begins or outs[first]))
        return Comparison(
            equal,
            None if first is None else rows[first],
            where,
            words,
            why,
            self._floor_text,
            self._factor,
            len(self._a.calls),
            len(self._b.calls),
            tuple(row for row in rows.values() if row.error is not None),
            tuple(self._remarks),
        )

    def _measure(self) -> None:
        """Run the models in other precisions."""
        coarse = self._coarse
        high = torch.float64 if coarse in (torch.float32, torch.float64) else torch.float32
        if coarse is torch.float64:
            self._scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        for number, (side, other) in enumerate(((self._a, self._b), (self._b, self._a))):
            if _FLOATS.index(side.dtype) > _FLOATS.index(other.dtype):
                continue  # its weights are rounded already
            low = torch.float32 if coarse is torch.float64 else coarse
            try:
                native = {(one.path, one.occurrence): one for one in side.calls}
                runs = native if side.dtype is low else side.run_in(low)
                self._measured.append((number, runs, side.run_in(high)))
            except Exception as error:  # of the user's code, which may know one precision only
                self._remarks.append(
                    f"{'AB'[number]} did not run in {dtype_name(low)} or {dtype_name(high)}: {spell(error)}"
                )
        measured = " and of ".join("AB"[number] for number, _, _ in self._measured)
        self._floor_text = (
            f"error of {measured} in {dtype_name(low)} against {dtype_name(high)}"
            if measured
            else f"not measured; taken for 4 eps of {dtype_name(coarse)}"
        )

    def _see(self, pair: Pair, kind: str) -> _Seen | None:
        """Compare the inputs or the outputs of a pair, or return None where they do not go together."""
        both = [_values(side, kind) for side in (pair.a, pair.b)]
        singles = [[pick for pick in picks if len(pick) == 1] for picks in both]
        if kind == "outputs" and len(singles[0]) == len(singles[1]) > 1:
            seen = [self._see_one(pair, kind, pick, pick) for pick in singles[0]]
            if all(one is not None for one in seen):
                return max((one for one in seen if one is not None), key=lambda one: one.ratio)
        tried = sorted(
            ((p, q) for p in singles[0] for q in singles[1]), key=lambda two: two[0][0] + two[1][0]
        )
        main = next((one for p, q in tried if (one := self._see_one(pair, kind, p, q)) is not None), None)
        # One side may pass hidden and residual apart, the other their sum.
        sums = [(p, q) for p in both[0] for q in both[1] if len(p) + len(q) == 3 and 0 in p and 0 in q]
        found = [main, *(self._see_one(pair, kind, p, q) for p, q in sums)]
        return min((one for one in found if one is not None), key=lambda one: one.errors.total, default=None)

    def _see_one(
        self, pair: Pair, kind: str, pick_a: tuple[int, ...], pick_b: tuple[int, ...]
    ) -> _Seen | None:
        a, b = _value(pair.a, kind, pick_a), _value(pair.b, kind, pick_b)
        values = None if a is None or b is None else self._tokens.pair(a, b)
        if values is None or a is None:
            return None
        errors = relative_errors(*values)
        floors = [
            floor
            for number, low, high in self._measured
            if (
                floor := self._floor(
                    low, high, pair.b if number else pair.a, kind, pick_b if number else pick_a
                )
            )
        ]
        eps = torch.finfo(self._coarse).eps
        least = eps / 4 if floors else 4 * eps
        whole = max(least, min((one.total for one in floors), default=0.0) * self._scale)
        worst = max(least, min((one.largest for one in floors), default=0.0) * self._scale)
        ratio = max(errors.total / whole, errors.largest / worst)
        return _Seen(errors, whole, ratio, values, a.shape)

    def _floor(
        self, low: _Runs, high: _Runs, calls: Sequence[Call], kind: str, pick: tuple[int, ...]
    ) -> Errors | None:
        keys = [(one.path, one.occurrence) for one in calls]
        if not all(key in low and key in high for key in keys):
            return None
        one, other = (_value([runs[key] for key in keys], kind, pick) for runs in (high, low))
        values = None if one is None or other is None else self._tokens.pair(one, other)
        return None if values is None else relative_errors(*values)


def _values(calls: Sequence[Call], kind: str) -> list[tuple[int, ...]]:
    """Return which leaves may be compared: each, or the sum of the first two."""
    found = getattr(calls[0], kind)[:_LEAVES]
    picks: list[tuple[int, ...]] = [(i,) for i in range(len(found))]
    if len(found) > 1 and found[0][1].shape == found[1][1].shape and found[0][1].rows.is_floating_point():
        picks.append((0, 1))
    return picks


def _value(calls: Sequence[Call], kind: str, pick: tuple[int, ...]) -> Kept | None:
    """Return the leaves' sum; those of several calls side by side, which had one input."""
    per_call: list[Kept] = []
    for one in calls if kind == "outputs" else calls[:1]:
        found = getattr(one, kind)
        if pick[-1] >= len(found):
            return None
        per_call.append(total([found[i][1] for i in pick]))
    return per_call[0] if len(per_call) == 1 else side_by_side(per_call)


class _Search:
    """The order in which differences appear, and the module in which the first one begins."""

    def __init__(
        self, pairs: list[Pair], ins: dict[Pair, _Seen | None], outs: dict[Pair, _Seen | None], factor: float
    ) -> None:
        self._pairs = pairs
        self._ins = ins
        self._outs = outs
        self._factor = factor
        self.begins: _Seen | None = None

    def first(self) -> tuple[bool | None, Pair | None, str, str]:
        """Return whether the models are equal, the module, where in it the difference begins, and why none is named."""
        root = next((pair for pair in self._pairs if pair.a[0].parent is None), None)
        if root is None or self._outs[root] is None:
            return None, None, "", "the outputs of the two models have shapes that do not go together"
        if self._differs(self._ins[root]):
            return None, None, "", "the models were not given the same inputs"
        events = sorted(
            [(pair.a[0].start, "inputs", pair) for pair in self._pairs]
            + [(pair.a[-1].end, "outputs", pair) for pair in self._pairs],
            key=lambda one: one[0],
        )
        last = ""
        for _, kind, pair in events:
            seen = (self._ins if kind == "inputs" else self._outs)[pair]
            if seen is None:
                continue
            if not self._differs(seen):
                last = f"the {kind[:-1]} of {_names(pair)}, which agrees"
                continue
            if self._is_convention(pair, kind):
                continue
            return self._name(pair, kind, last, seen)
        return True, None, "", ""

    def _name(self, pair: Pair, kind: str, last: str, seen: _Seen) -> tuple[bool, Pair | None, str, str]:
        if kind == "outputs" and (self._ins[pair] is not None or not (pair.a[0].inputs and pair.b[0].inputs)):
            inside = last and pair.a[0].parent is not None and not pair.a[0].is_leaf
            return False, pair, f"in its own code, after {last}" if inside else "", ""
        self.begins = seen
        around = [one for one in self._pairs if all(one.a[0].holds(inner) for inner in pair.a)]
        around = [
            one
            for one in around
            if self._ins[one] is not None and all(one.b[0].holds(inner) for inner in pair.b)
        ]
        until = f"the {kind[:-1]} of {_names(pair)}, which differs by {_number(seen.errors.total)}"
        if not around:
            return (
                False,
                None,
                "",
                f"the difference begins before {until}, outside all modules that could be compared",
            )
        found = max(around, key=lambda one: one.a[0].start)
        if not last:
            return False, None, "", f"nothing could be compared before {until}"
        return False, found, f"in its own code, between {last}, and {until}", ""

    def _differs(self, seen: _Seen | None) -> bool:
        return seen is not None and seen.ratio > self._factor

    def _is_convention(self, pair: Pair, kind: str) -> bool:
        """Return True for a difference that is gone at the end of the module, or of one around it."""
        seen = (self._ins if kind == "inputs" else self._outs)[pair]
        for one in self._pairs:
            after = self._outs[one]
            if (
                seen is None
                or after is None
                or not (one.a[0].holds(pair.a[0]) or (one is pair and kind == "inputs"))
            ):
                continue
            is_gone = not self._differs(after) and not (one is not pair and self._differs(self._ins[one]))
            if is_gone and seen.errors.total > _VANISHED * after.errors.total:
                return True
        return False


def _module_error(pair: Pair, before: _Seen | None, after: _Seen | None) -> ModuleError:
    along = None if after is None else by_token(after.errors.rows, after.shape)
    return ModuleError(
        ", ".join(one.path for one in pair.a),
        ", ".join(one.path for one in pair.b),
        pair.a[0].class_name,
        pair.b[0].class_name,
        None if before is None else before.errors.total,
        None if after is None else after.errors.total,
        0.0 if after is None else after.floor,
        () if along is None else tuple(along.tolist()),
    )


def _likely(pair: Pair, seen: _Seen | None) -> list[str]:
    """Return what the difference looks like, from the modules' settings, weights and values."""
    found = []
    if len(pair.a) == len(pair.b) == 1:
        one, other = pair.a[0].module, pair.b[0].module
        settings = [_settings(module) for module in (one, other)]
        found += [
            f"{name} is {settings[0][name]} in A and {settings[1][name]} in B"
            for name in settings[0]
            if settings[1].get(name, settings[0][name]) != settings[0][name]
        ]
        biases = [module._parameters.get("bias") is not None for module in (one, other)]
        if biases[0] != biases[1] and pair.a[0].is_leaf and pair.b[0].is_leaf:
            found.append(f"only {'A' if biases[0] else 'B'} has a bias")
        for name, (x, y) in {
            "weight": (weight_of(one), weight_of(other)),
            "bias": (one._parameters.get("bias"), other._parameters.get("bias")),
        }.items():
            if x is not None and y is not None and x.shape == y.shape:
                error = relative_errors(
                    *(w.detach().cpu().to(torch.float64).reshape(len(w), -1) for w in (x, y))
                ).total
                if error > max(torch.finfo(x.dtype).eps, torch.finfo(y.dtype).eps):
                    found.append(f"its {name}s are {_number(error)} apart")
    return (
        found
        if seen is None
        else found + shape_of_difference(*seen.values, seen.errors, seen.shape, seen.floor)
    )


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and words that a module keeps, by name; any name with eps is eps."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, bool | int | float | str) and name != "training":
            found["eps" if "eps" in name else name] = value
    return found


def _names(pair: Pair) -> str:
    one, other = (", ".join(module_name(call.path) for call in side) for side in (pair.a, pair.b))
    return one if one == other else f"{one} | {other}"


def _named(path: str, class_name: str) -> str:
    return f"{module_name(path)} ({visible(class_name)})"


def _number(error: float | None) -> str:
    return "not comparable" if error is None else f"{error:.2g}"
