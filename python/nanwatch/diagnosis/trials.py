"""Trials of changes on the batch of one failure, and their judge: all is finite, and near what float64 gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ..instrumentation.wrapped_names import module_names
from ..numerics._reference import _to_arithmetic
from ..precision.casting import NARROW, cast
from ..report.finding import Cure, Finding
from ..util.visible import spell
from .batch_snapshot import BatchSnapshot
from .experiment import Allows, Experiment, MakeCall, cast_to, make_call, nothing_allowed, run

# A working change moves the results by at most 1 % of their norm. More would make another model.
_MOST_CHANGE = 0.01
# Or each element by at most this: the angle of equal vectors is 1.4e-3 where its cosine is kept 1e-6 below 1.
MOST_BY_GUARD = 3e-3
# A bound in float32 is no less right because float64 goes on to 1e+51.
_LARGEST = torch.finfo(torch.float32).max
# A loss that squares an output past this overflows, and the batch of a forward has no loss yet.
_LARGEST_SQUARED = _LARGEST**0.5
# Methods of a tensor that make it narrower.
_CASTS = frozenset({"float", "half", "bfloat16", "double"})
# Bits. With less, the next batch whose values are twice as large fails again.
LEAST_ROOM = 1.0
Hold = Callable[[], AbstractContextManager[Any]]
Room = Callable[[Experiment], float | None]


@dataclass
class Trials:
    """Trials of changes on the batch of one finding. Cures that work go to `cures`.

    `guilty` is the module in whose code the value was made, None for code outside of all. `allows` tells which
    infinities are meant, and `loss_scale` is None where it is not known. `exact` is the first run in float64, which is
    the measure of all trials.
    """

    snapshot: BatchSnapshot
    finding: Finding
    model: nn.Module
    allows: Allows = nothing_allowed
    loss_scale: float | None = None
    cures: list[Cure] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    runs: int = 0
    exact: Experiment | None = None

    def __post_init__(self) -> None:
        self.names = module_names(self.model)
        is_producer = self.finding.origin == "produced"
        self.guilty = self.finding.module if is_producer else self.finding.source_module

    def run(
        self,
        hold: Hold = nullcontext,
        make: MakeCall = make_call,
        snapshot: BatchSnapshot | None = None,
        **options: Any,
    ) -> Experiment:
        """Run the batch under a change, forward and backward, with the options of `experiment.run`."""
        self.runs += 1
        with hold():
            return run(snapshot or self.snapshot, self.names, make, self.allows, **options)

    def attempt(
        self, what: str, *change: Any, room: Room | None = None, is_expected: bool = False, **options: Any
    ) -> bool:
        """Try a change, given as `run` takes it. Keep it as a cure if it works. Return whether it does.

        `room` returns the bits of headroom that a trial leaves. A change that works leaves one. One that a user would
        expect to work is also kept where it does not.
        """
        experiment = self.run(*change, **options)
        if experiment.error is not None:
            self.remarks.append(f"could not try to {what}: {spell(experiment.error)}")
            return False
        works, effect = self.judge(experiment)
        if effect and not works:
            self.remarks.append(f"with a change the batch is finite, but {effect}: {what}")
        bits = room(experiment) if works and room else None
        works = works and (bits is None or bits >= LEAST_ROOM)
        self.cures += [Cure(what, works, bits, "", "" if room else effect)] if works or is_expected else []
        return works

    def judge(
        self, experiment: Experiment, values: Sequence[Tensor] = (), exact: Sequence[Tensor] = ()
    ) -> tuple[bool, str]:
        """Return whether a trial works, and in words what it moves, "" where not all is finite.

        Bad data stays bad: then the outputs and the gradients have to be finite. The results have to be near those of
        float64. `values` are those of the changed expression, and `exact` what they are in float64. A guard that moves
        them by the epsilon of a textbook at most is right at a pole where the gradient of float64 fails too, whatever
        scale the results have.
        """
        is_given = self.finding.origin in ("data", "buffer")
        bad = [label for label in experiment.bad_labels() if not (is_given and label.startswith("input"))]
        if experiment.error is not None or bad:
            return False, ""
        truth = self.exact or self.in_float64()
        is_close, words = compared(experiment.results, truth.results)
        farthest, effect = _moved(values, exact)
        if not is_close and 0 < farthest <= MOST_BY_GUARD and "gradient" in truth.bad_labels():
            is_close, words = True, f"float64's gradient fails too; {words}"
        return is_close, "; ".join(filter(None, [words, effect]))

    def in_float64(self, around: Hold = nullcontext) -> Experiment:
        """Run the batch in float64, under a change that only looks."""

        def make(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if module is not self.snapshot.module:
                return make_call(module, args, kwargs)
            args, kwargs = cast((args, kwargs), (torch.float32, *NARROW), torch.float64)
            with loaded(module, torch.float64), Float64():
                return make_call(module, args, kwargs)

        with around():
            experiment = run(self.snapshot, self.names, make, self.allows)
        self.exact = self.exact or experiment
        return experiment


def compared(values: Sequence[Tensor], truth: Sequence[Tensor]) -> tuple[bool, str]:
    """Compare results with those of float64, at the elements that float64 gives as finite, and float32 can hold."""
    if [x.shape for x in values] != [x.shape for x in truth]:
        return True, "not compared with float64"
    pairs = [(x, y) for x, y in zip(values, truth, strict=True) if x.is_floating_point() or x.is_complex()]
    # A format of 8 bits rounds by more than 1 %.
    known = [(*_known(x, y, _LARGEST), max(_MOST_CHANGE, torch.finfo(x.dtype).eps / 2)) for x, y in pairs]
    failing = sum(rest.numel() for *_, rest, _ in known)
    rests = [rest for *_, rest, _ in known if rest.numel()]
    guarded = max((float(rest.real.nan_to_num(0, 0).max()) for rest in rests), default=0.0)
    if guarded > _LARGEST_SQUARED and all(x.dtype is not torch.float64 for x, _ in pairs):
        return False, f"the result is {guarded:.3g} where float64 fails, and its square would overflow"
    # A loss that fails in float64 is not compared, though outputs of the model beside it are.
    is_lost = any(rest.numel() and not right.numel() for right, *_, rest, _ in known)
    is_finite = all(_to_arithmetic(y).isfinite().all() for _, y in pairs)
    fails = "float64 gives more than float32 holds" if is_finite else "as it is, it fails in float64 too"
    known = [x for x in known if x[0].numel()]
    if not known:
        return True, fails
    largest = max(float(right.abs().max()) for right, *_ in known)
    errors = [float(distance.max()) for _, distance, *_ in known]
    is_near = [float(distance.norm()) <= most * float(right.norm()) for right, distance, *_, most in known]
    if not all(near or error <= MOST_BY_GUARD for near, error in zip(is_near, errors, strict=True)):
        words = f"the result is {max(errors):.3g} away from that of float64, of values up to {largest:.3g}"
        return False, words
    words = f"moves the result by {max(errors):.1e} from that of float64"
    if is_lost:
        return True, fails if all(is_near) else f"{words}; {fails}"
    if all(is_near):
        words = f"agrees with float64, to {max(errors) / (largest or 1):.1e} of the largest value"
    return True, words + (f"; as it is, it fails in float64 at {failing:,} elements too" if failing else "")


def _moved(values: Sequence[Tensor], truth: Sequence[Tensor]) -> tuple[float, str]:
    """Return how far a guard moves the values of its expression from those of float64, and in words; "" for none."""
    pairs = zip(values, truth, strict=False)
    known = [_known(x, y, inf) for x, y in pairs if x.shape == y.shape and x.is_floating_point()]
    right, distance, new, _ = map(torch.cat, zip(*known, strict=True)) if known else (torch.empty(0),) * 4
    is_off = distance > _MOST_CHANGE * right.abs() + 1e-6 * right.abs().max() if right.numel() else right
    if not is_off.any():
        return 0.0, ""
    i = int(distance.argmax())
    example = f"{float(right[i]):.3g} becomes {float(new[i]):.3g}"
    words = f"moves {int(is_off.sum()):,} of {len(right):,} elements that float64 gives as finite: {example}"
    return float(distance[i]), words


def _known(value: Tensor, exact: Tensor, most: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the elements of `exact` that are finite and at most `most`, how far those of `value` are, and these.

    The last are the elements of `value` everywhere else.
    """
    value, exact = _to_arithmetic(value), _to_arithmetic(exact)
    kind = torch.promote_types(torch.promote_types(value.dtype, exact.dtype), torch.float64)
    value, exact = value.to(kind), exact.to(kind)
    is_known = exact.isfinite() & (exact.abs() <= most)
    new, right = value[is_known], exact[is_known]
    return right, (right - new).abs().nan_to_num(torch.inf, torch.inf), new, value[~is_known]


# The batch in another format


@contextmanager
def loaded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give `model` for the block the weights and buffers of `model.to(dtype)`, and cast nothing else."""
    modules = (module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule))
    tables: list[dict[str, Any]] = [table for x in modules for table in (x._parameters, x._buffers)]
    copies: dict[Tensor, Tensor] = {}  # so that tied weights stay tied
    with ExitStack() as stack:
        for table in tables:
            stack.callback(table.update, dict(table))
            for name, x in table.items():
                if x is not None and x.is_floating_point() and x.dtype != dtype:
                    copies[x] = copies.get(x, x.detach().to(dtype).requires_grad_(x.requires_grad))
                    table[name] = copies[x]
        yield


_wide = partial(_pytree.tree_map, partial(cast_to, torch.float64), is_leaf=lambda x: type(x) is torch.Size)


class Float64(TorchFunctionMode):
    """Runs each operation on float64 copies of its operands; a cast to a narrower format does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation in float64."""
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute: x.dtype is the user's
            return _wide(func(*args))
        if name in _CASTS:
            return args[0].to(torch.float64)
        wide, options = _wide((args, kwargs or {}))
        return _wide(func(*wide, **options))
