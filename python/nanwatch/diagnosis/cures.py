"""Cures of a failure: changes of the source, options of modules, and other formats, each tried on the failed batch."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from keyword import iskeyword
from math import ceil, frexp, inf, isfinite, log2
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.wrapped_names import named_modules, unwrapped
from ..precision.precision import autocast_kinds, cast, replaced, run_in_fp32
from ..recording.walk import call_leaves
from ..records.record import Record, least_bits
from ..report.finding import Cure
from .experiment import LEAST_ROOM, Experiment, Hold, LossModule, MakeCall, Trials, make_call
from .formats import loaded
from .patching.rounds import Rounds
from .patching.source import TargetFinder, find_target
from .patching.table import TOO_SHORT
from .provenance import Step

# The guilty module and those around it, the whole model apart, that are tried in float32.
_MOST_MODULES = 3
# Past the range of float16 (2^-24 to 2^16) nothing is to be gained by a smaller loss scale.
_LARGEST_DIVISOR = 2.0**40
_HALVES = "float16", "bfloat16"
# Steps of a training with another learning rate, and seconds for all such trainings. One diverges whose loss has grown
# by so many times its size, and one learns whose loss has fallen by this part.
_NUM_STEPS, _MOST_SECONDS, _DIVERGED, _FALL = 20, 20.0, 10.0, 0.01
# A weight that is so many times as large as a new one.
_MUCH_LARGER = 5.0


def try_patches(trials: Trials, step: Step | None, at: TargetFinder = find_target) -> None:
    """Try an option of the guilty module, then changes of the source. Keep the first that works.

    `step` is the operation that failed, and `at` finds the function that runs a line.
    """
    _try_option(trials)
    if not trials.cures and step is not None:
        Rounds(trials, at).go(step)


def _try_option(trials: Trials) -> None:
    """Try the batch with CTC losses, the guilty module or those that a loss calls, that leave out what is too short."""
    modules = dict.fromkeys((*trials.names, *trials.snapshot.module.modules()))
    losses = [m for m in modules if isinstance(m, nn.CTCLoss) and not m.zero_infinity]
    suspects = [m for m in losses if trials.names.get(m, trials.guilty) == trials.guilty]

    @contextmanager
    def hold() -> Iterator[None]:
        for module in losses:
            module.zero_infinity = True
        try:
            yield
        finally:
            for module in losses:
                module.zero_infinity = False

    for guilty in suspects[:1]:
        name = trials.names.get(guilty)
        owner = "the loss's" if name is None else f"`{code_of(trials.model, name)}` a"
        trials.attempt(f"{TOO_SHORT}: make {owner} CTCLoss with zero_infinity=True", hold)


def try_training(trials: Trials, first: Mapping[str, float]) -> None:
    """Try a training from new weights on this batch: a cure is what it shows to be wrong, the rate or the weights.

    Where the loss grows with the present learning rate, lower ones are tried, and a clip. Where it does not, a weight
    is at fault that was far larger in the beginning than its module makes it: `first` has the abs max by name.
    """
    end = time.monotonic() + _MOST_SECONDS
    losses, new = _train(trials)
    if not losses or not isfinite(losses[0]):
        return
    steps = f"{_NUM_STEPS} steps on this batch from new weights take the loss from"
    diverges = not losses[-1] - losses[0] <= _DIVERGED * abs(losses[0])
    if not diverges:
        ratios = [(first[name] / size, name) for name, size in new.items() if size and name in first]
        large = [name for ratio, name in sorted(ratios, reverse=True) if ratio > _MUCH_LARGER]
        for name in large[:1]:
            others = f" and {len(large) - 1} others" if len(large) > 1 else ""
            words = f"initialise `{name}`{others} smaller: up to {new[name]:.2g}, as its module does, not"
            effect = f"{steps} {losses[0]:.3g} to {losses[-1]:.3g}"
            trials.cures.append(Cure(f"{words} {first[name]:.3g}", True, None, "", effect))
    if not diverges or not trials.finding.num_steps:
        return
    rates = sorted({float(group["lr"]) for x in trials.optimizers() for group in x.param_groups})
    lower = ((10.0**power, inf) for power in range(3, 10))
    for divisor, clip in ((10.0, inf), (100.0, inf), (1.0, 1.0), *lower):
        fallen = _train(trials, divisor, clip)[0] if time.monotonic() < end else []
        if _falls(fallen):
            old, new_rates = (" and ".join(f"{rate / by:g}" for rate in rates) for by in (1, divisor))
            words = f"lower the learning rate to {new_rates}, from {old}"
            if clip < inf:
                words = f"clip the gradients before the step, clip_grad_norm_(model.parameters(), {clip})"
            effect = f"{steps} {fallen[0]:.3g} to {fallen[-1]:.3g}, without the change to {losses[-1]:.3g}"
            trials.cures.append(Cure(words, True, None, "", effect))
            return


def _falls(losses: Sequence[float]) -> bool:
    return bool(losses) and all(map(isfinite, losses)) and losses[-1] < losses[0] - _FALL * abs(losses[0])


def _train(trials: Trials, divisor: float = 1.0, clip: float = inf) -> tuple[list[float], dict[str, float]]:
    """Return the losses of a training with divided learning rates and a clip, [] without one, and the new weights.

    These are the abs max by name of those that modules can reset. It begins with them, and with new matrices.
    """

    def begin(optimizers: Sequence[Optimizer]) -> dict[str, float]:
        new = dict[str, float]()
        for prefix, module in trials.model.named_modules():
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            for x in module.parameters(recurse=False) if reset is None else ():
                if x.ndim > 1:
                    nn.init.normal_(x, std=x.shape[-1] ** -0.5)
            if reset is not None:
                reset()
                weights = module.named_parameters(prefix, recurse=False)
                new |= {name: float(x.detach().abs().max()) for name, x in weights if x.numel()}
        for optimizer in optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] / divisor
        return new

    losses, _, new = trials.train(_NUM_STEPS, begins=begin, clip=clip) or ([], 0.0, {})
    return losses, new


def try_formats(trials: Trials) -> None:
    """Try other formats, where one narrower than float32 takes part, the smallest change first.

    Only for what a module produced or received: weights, buffers and data that were not finite before the call have no
    cure here. Each trial changes what a user would change who applies the cure as it is printed, and needs a bit of
    headroom. A change that does not work is left out, except float32 for the guilty module, which a user expects to
    help.
    """
    if trials.finding.origin in ("produced", "received"):
        _Formats(trials).go()


class _Formats:
    """The trials of other formats. `_seen` is a run in which nothing is changed."""

    def __init__(self, trials: Trials) -> None:
        self._trials, self._finding, self._snapshot = trials, trials.finding, trials.snapshot
        self._modules = {x.name: x.module for x in named_modules(trials.model, remove_duplicate=False)}
        root = self._snapshot.module
        root = (root.called if isinstance(root, LossModule) else root) or root
        self._root = trials.names.get(unwrapped(root), "")
        self._at = self._root if trials.guilty is None else trials.guilty
        self._is_backward = self._finding.phase == "backward"
        # Gradients of float16 weights have no scaler: a loss that grows with the square of the outputs has to fit.
        self._is_half = any(p.dtype is torch.float16 for p in self._snapshot.module.parameters())
        squares = self._is_half and not self._is_backward
        self._try = partial(trials.attempt, squares=squares)
        self._seen = trials.run(squares=squares)

    def go(self) -> None:
        """Try the formats, where a narrow one takes part in the guilty call, the bad record or the backward."""
        modules = [self._at, *self._around()][:_MOST_MODULES]
        if self._is_backward:
            bad = [x for x in self._seen.gradients if x.is_fault]
            if bad and any(x.dtype in _HALVES for x in self._seen.gradients):
                self._smaller_scale()
                any(map(self._in_float32, modules))
            return
        calls = [call for call in self._seen.calls if call.name in (self._at, self._finding.module)]
        dtypes = [x.dtype for x in (*self._finding.operands, *(x for call in calls for x in call.records))]
        is_narrow = any(x in _HALVES or "float8" in x for x in dtypes)
        if not is_narrow and not any(call.autocast for call in calls):
            return
        works = self._in_float32(self._at, is_expected=True)
        is_wide_enough = self._bfloat16()
        works = works or any(self._in_float32(name) for name in modules[1:] if name != self._root)
        if not (works or is_wide_enough or self._at == self._root):
            self._in_float32(self._root)
        if not is_wide_enough:
            self._clamp()

    def _in_float32(self, name: str, *, is_expected: bool = False) -> bool:
        code = f"nanwatch.run_in_fp32({code_of(self._trials.model, name)})"
        words = f"run {_in_words(name)} in float32, {code}"
        hold, room = partial(run_in_fp32, self._modules[name]), partial(self._room, name)
        return self._try(words, hold, room=room, is_expected=is_expected)

    def _bfloat16(self) -> bool:
        """Try bfloat16, which has the range of float32, for all float16. Return whether it works."""
        snapshot = self._snapshot
        tensors = [x for _, x in call_leaves(snapshot.args, snapshot.kwargs) if isinstance(x, Tensor)]
        is_given = any(x.dtype is torch.float16 for x in tensors)
        if self._is_half and is_given and self._root:
            # The batch is a call of a part. The code that hands float16 to it was not seen, so no run here shows
            # whether that code hands on bfloat16 once the model is in bfloat16.
            return False
        words: list[str] = []
        hold: Hold = nullcontext
        if any(call.autocast is torch.float16 for call in self._seen.calls):
            kind = next((mode.device_type for mode in snapshot.autocast if mode.enabled), "cuda")
            words.append(f'use bfloat16 in autocast, torch.autocast("{kind}", dtype=torch.bfloat16)')
        if self._is_half:
            inputs = ", and give it bfloat16 inputs" if is_given else ""
            words.append(f"load the weights in bfloat16, model.to(torch.bfloat16){inputs}")
            args, kwargs = cast((snapshot.args, dict(snapshot.kwargs)), (torch.float16,), torch.bfloat16)
            hold = partial(loaded, snapshot.module, torch.bfloat16)
            snapshot = replace(snapshot, args=args, kwargs=kwargs)
        change = hold, _under_bfloat16, snapshot
        return bool(words) and self._try(" and ".join(words), *change, room=partial(self._room, None))

    def _clamp(self) -> None:
        """Try to clamp the value that leaves float16 to its ends, where bfloat16 is not to be had."""
        finding, records = self._finding, self._failing(self._seen)
        ends = next((x.ends for x in records if x.is_fault and x.dtype in _HALVES), None)
        if ends is None or any(call.name == self._at and call.autocast for call in self._seen.calls):
            return
        module, side = self._modules.get(finding.module), finding.label.partition("[")[0]
        if module is not None and side in ("input", "output"):
            words = f"clamp the {side} of {_in_words(finding.module)} to ±{ends.largest:g}"
            self._try(words, nullcontext, _clamping(module, side, ends.largest))

    def _smaller_scale(self) -> None:
        """Find the largest loss scale below the present one with which all gradients of the backward are finite.

        A backward is in proportion to what it is given. There is no cure where no float16 takes part, whose range is
        the reason to scale, and one that does not work where the scale is known and a scale of 1 does not help either.
        """
        scale = self._trials.loss_scale

        @cache
        def room(divisor: float) -> float:
            made = self._trials.run(divisor=divisor).gradients
            bits = least_bits(record for record in made if record.dtype == "float16")
            is_bad = any(record.isfinite is False for record in made)
            return -inf if is_bad else inf if bits is None else bits

        most = min(_LARGEST_DIVISOR if scale is None else scale, _largest_divisor(self._seen.given))
        if most <= 1 or all(record.dtype != "float16" for record in self._seen.gradients):
            return
        divisors = [*(2.0**i for i in range(1, ceil(log2(most)))), most]
        divisor = divisors[bisect_left(divisors[:-1], True, key=lambda x: room(x) >= LEAST_ROOM)]
        bits = room(divisor)
        if bits == -inf and divisor != scale:
            return
        known = "" if scale is None else f"a loss scale of {scale / divisor:g} in place of {scale:g}"
        words = known or f"a loss scale that is {divisor:g} times smaller"
        self._trials.cures.append(Cure(words, bits >= LEAST_ROOM, bits if isfinite(bits) else None))

    def _room(self, changed: str | None, experiment: Experiment) -> float | None:
        """Return the headroom of a trial. The module `changed` gives its results back in the format around it."""
        if self._is_backward:
            return least_bits(x for x in experiment.gradients if x.dtype in _HALVES)
        outputs = [x for x in experiment.records(changed) if x.role == "output"]
        return least_bits([*self._failing(experiment), *outputs])

    def _failing(self, experiment: Experiment) -> list[Record]:
        return [x for x in experiment.records(self._finding.module) if x.label == self._finding.label]

    def _around(self) -> Iterator[str]:
        """Yield the modules around the guilty one that this batch called, the nearest first."""
        called, name = {call.name for call in self._seen.calls}, self._at
        while name and name != self._root:
            name = name.rpartition(".")[0]
            if name in self._modules and (watched := self._trials.names[self._modules[name]]) in called:
                yield watched


def _under_bfloat16(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Make a call with bfloat16 where autocast has float16: here, as a model may enter autocast in its own forward."""
    with ExitStack() as modes:
        for kind in autocast_kinds():
            if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16:
                modes.enter_context(torch.autocast(kind, torch.bfloat16, cache_enabled=False))
        return make_call(module, *args, **kwargs)


def _clamping(chosen: nn.Module, side: str, limit: float) -> MakeCall:
    """Return what makes calls with the floating-point tensors of one side of a module clamped to ±limit."""

    def clamped(value: Any) -> Any:
        return replaced(value, lambda x: x.clamp(-limit, limit) if x.dtype.is_floating_point else None)

    def make(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is chosen and side == "input":
            args, kwargs = clamped((args, kwargs))
        output = make_call(module, *args, **kwargs)
        return clamped(output) if module is chosen and side == "output" else output

    return make


def _largest_divisor(given: Sequence[Record]) -> float:
    """Return by how much these may be divided before the largest element of one becomes subnormal."""
    divisors = [x.abs_max / x.ends.smallest_normal for x in given if x.abs_max and x.ends is not None]
    # Rounded down to a power of two, for a division that rounds nothing.
    return max(1.0, 2.0 ** (frexp(min(*divisors, _LARGEST_DIVISOR))[1] - 1)) if divisors else 1.0


def _in_words(name: str) -> str:
    return f"`{name}`" if name else "the model"


def code_of(model: nn.Module, name: str) -> str:
    """Return the expression that reaches the module in Python: `model.decoder.block[0]`."""
    path = next((x.path for x in named_modules(model, remove_duplicate=False) if x.name == name), name)
    code, module = "model", model
    for part in path.split(".") if path else ():
        is_index = isinstance(module, nn.ModuleList | nn.Sequential) and part.isdecimal()
        if not is_index and (not part.isidentifier() or iskeyword(part)):
            return f"model.get_submodule({path!r})"
        code += f"[{part}]" if is_index else f".{part}"
        module = module.get_submodule(part)
    return code
