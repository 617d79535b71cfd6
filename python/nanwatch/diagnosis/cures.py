"""Cures of a failure: changes of the source, options of modules, and other formats, each tried on the failed batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from math import ceil, frexp, inf, isfinite, log2
from typing import Any

import torch
from torch import Tensor, nn

from ..instrumentation.wrapped_names import named_modules, unwrapped
from ..precision.casting import autocast_kinds, cast, replaced
from ..precision.precision import run_in_fp32
from ..recording.walk import call_leaves
from ..records.headroom import least_bits
from ..records.record import Record
from ..report.finding import Cure, Finding, working_first
from ..util.visible import spell
from .batch_snapshot import BatchSnapshot, is_narrow, no_second_run
from .diagnosis import Diagnosis
from .experiment import Experiment, MakeCall, make_call
from .patching.code_swap import TargetFinder, find_target
from .patching.rounds import Rounds
from .patching.table import OPTIONS
from .trials import NO_CONDITIONS, Conditions, Hold, Trials, loaded

Cures = tuple[tuple[Cure, ...], tuple[str, ...]]
# Runs of a batch for other formats. Two cures are a choice; more would only cost forwards.
MAX_RUNS = 5
_ENOUGH = 2
# Modules around the guilty one that are tried on a backward.
_MOST_MODULES = 3
# Bits. With less, the next batch whose values are twice as large fails again.
_LEAST_ROOM = 1.0
# Past the range of float16 (2^-24 to 2^16) nothing is to be gained by a smaller loss scale.
_LARGEST_DIVISOR = 2.0**40
_NOT_BACK = "no cure was tried: the failure did not come back when the batch ran again"


def try_patches(
    snapshot: BatchSnapshot,
    finding: Finding,
    model: nn.Module,
    diagnosis: Diagnosis,
    *,
    conditions: Conditions = NO_CONDITIONS,
    at: TargetFinder = find_target,
) -> Cures:
    """Return `(cures, remarks)`: an option of the guilty module, or a change of the source; the first that works.

    `at` finds the function that runs a line. Raises nothing of its own: what goes wrong is a remark.
    """
    trials = Trials(snapshot, finding, model, conditions)
    try:
        _try_option(trials)
        if not trials.cures and diagnosis.step is not None and diagnosis.place is not None:
            Rounds(trials, at).go(diagnosis.step)
    except Exception as error:
        trials.remarks.append(f"the search for a change of the source ended early: {spell(error)}")
    return tuple(trials.cures), tuple(trials.remarks)


def _try_option(trials: Trials) -> None:
    """Try the batch with an option of the guilty module, given to all modules of its kind."""
    guilty = next((m for m, name in trials.names.items() if name == trials.guilty), None)
    kinds = [kind.__name__ for kind in type(guilty).__mro__ if kind.__name__ in OPTIONS]
    if not kinds:
        return
    option, value, words = OPTIONS[kinds[0]]
    modules = [m for m in trials.names if type(m) is type(guilty) and (getattr(m, option) or 0) < value]

    @contextmanager
    def hold() -> Iterator[None]:
        before = [getattr(module, option) for module in modules]
        try:
            for module in modules:
                setattr(module, option, value)
            yield
        finally:
            for module, old in zip(modules, before, strict=True):
                setattr(module, option, old)

    if guilty in modules and trials.is_finite(experiment := trials.run(hold)):
        is_close, effect = trials.agreement(experiment)
        if is_close:
            code = code_of(trials.model, trials.guilty or "")
            what = f"{words}: make {type(guilty).__name__} with {option}={value!r}, as `{code}`"
            trials.cures.append(Cure(what, True, None, "", effect))


def try_formats(
    snapshot: BatchSnapshot,
    finding: Finding,
    model: nn.Module,
    *,
    conditions: Conditions = NO_CONDITIONS,
) -> Cures:
    """Return `(cures, remarks)` from trials of other formats, where one narrower than float32 takes part.

    Only for what a module produced or received: weights, buffers and data that were not finite before the call have no
    cure here. Each trial changes what a user would change who applies the cure as it is printed, and needs a bit of
    headroom. A change that does not work is left out, except float32 for the guilty module, which a user expects to
    help.

    The model is left as it was. Nothing is raised but KeyboardInterrupt and its like: what goes wrong is a remark.
    """
    if finding.origin not in ("produced", "received"):
        return (), ()
    if finding.transient:
        return (), (_NOT_BACK,)
    if reason := no_second_run(snapshot.module):
        return (), (f"no cure was tried: {reason}",)
    trials = Trials(snapshot, finding, model, conditions)
    formats = _Formats(trials)
    try:
        if finding.phase == "backward":
            formats.of_backward()
        else:
            formats.of_forward()
    except _Done:
        pass
    except Exception as error:
        trials.remarks.append(f"the search for cures ended early: {spell(error)}")
    return working_first(trials.cures), tuple(trials.remarks)


class _Done(Exception):  # noqa: N818
    """Enough cures are found, or all runs are used."""


class _Formats:
    """The trials of other formats, the smallest change first."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._modules = {
            named.name: named.module for named in named_modules(trials.model, remove_duplicate=False)
        }
        self._root = trials.names.get(unwrapped(trials.snapshot.module), "")
        self._guilty = self._root if trials.guilty is None else trials.guilty
        # How the batch ran with nothing changed, or with nothing but the guilty module: what came before is the same.
        self._seen = Experiment()
        self._is_backward = trials.finding.phase == "backward"

    def of_forward(self) -> None:
        """Try float32 for the guilty module, bfloat16, larger modules, and the ends of float16."""
        trials = self._trials
        self._seen = self._run()
        error = self._seen.error
        if trials.finding.transient is None and not any(x.is_fault for x in self._failing(self._seen)):
            raised = error and f"no cure was tried: the batch, run again, raised {spell(error)}"
            trials.remarks.append(raised or _NOT_BACK)
            return
        if not self._is_narrow():
            return
        works = self._in_float32(self._guilty, is_expected=True)
        is_wide_enough = self._bfloat16()
        larger = [name for name in self._around() if name != self._root]
        works = works or any(map(self._in_float32, larger))
        if not (works or is_wide_enough or self._guilty == self._root):
            self._in_float32(self._root)
        if not is_wide_enough:
            self._clamp()

    def of_backward(self) -> None:
        """Try a smaller loss scale, and float32 for the guilty module and those around it."""
        self._seen = self._run()
        if not self._seen.has_bad_gradients:
            return
        if (cure := self._smaller_scale()) is not None:
            self._trials.cures.append(cure)
        if any(record.dtype in ("float16", "bfloat16") for record in self._seen.gradients):
            for name in [self._guilty, *self._around()][:_MOST_MODULES]:
                if self._in_float32(name):
                    return

    def _in_float32(self, name: str, *, is_expected: bool = False) -> bool:
        experiment = self._run(lambda: run_in_fp32(self._modules[name]))
        if self._seen.error is not None and experiment.error is None:
            self._seen = (
                experiment  # a check of the program's own ended the first run before the guilty call did
            )
        what = (
            f"run {module_words(name)} in float32, nanwatch.run_in_fp32({code_of(self._trials.model, name)})"
        )
        return self._judge(what, experiment, changed=name, is_expected=is_expected)

    def _bfloat16(self) -> bool:
        """Try bfloat16, which has the range of float32, for all float16. Return whether it works."""
        snapshot = self._trials.snapshot
        weights = any(p.dtype is torch.float16 for p in snapshot.module.parameters())
        tensors = [x for _, x in call_leaves(snapshot.args, snapshot.kwargs) if isinstance(x, Tensor)]
        given = any(x.dtype is torch.float16 for x in tensors)
        if weights and given and self._root:
            # The batch is a call of a part. The code that hands float16 to it was not seen, so no run here shows
            # whether that code hands on bfloat16 once the model is in bfloat16.
            return False
        words: list[str] = []
        hold: Hold = nullcontext
        if any(call.autocast is torch.float16 for call in self._seen.calls):
            kind = next((mode.device_type for mode in snapshot.autocast if mode.enabled), "cuda")
            words.append(f'use bfloat16 in autocast, torch.autocast("{kind}", dtype=torch.bfloat16)')
        if weights:
            inputs = ", and give it bfloat16 inputs" if given else ""
            words.append(f"load the weights in bfloat16, model.to(torch.bfloat16){inputs}")
            called_with = snapshot.args, dict(snapshot.kwargs)
            args, kwargs = cast(called_with, (torch.float16,), torch.bfloat16)
            hold = partial(loaded, snapshot.module, torch.bfloat16)
            snapshot = replace(snapshot, args=args, kwargs=kwargs)
        if not words:
            return False
        return self._judge(" and ".join(words), self._run(hold, _under_bfloat16, snapshot))

    def _clamp(self) -> None:
        """Try to clamp the value that leaves float16 to its ends, where bfloat16 is not to be had."""
        finding, records = self._trials.finding, self._failing(self._seen)
        ends = next((x.ends for x in records if x.is_fault and x.dtype.endswith("float16")), None)
        if ends is None or any(call.name == self._guilty and call.autocast for call in self._seen.calls):
            return
        module, side = self._modules.get(finding.module), finding.label.partition("[")[0]
        if module is not None and side in ("input", "output"):
            words = f"clamp the {side} of {module_words(finding.module)} to ±{ends.largest:g}"
            experiment = self._run(make=_clamping(module, side, ends.largest))
            self._judge(words, experiment, needs_room=False)

    def _smaller_scale(self) -> Cure | None:
        """Return the largest loss scale below the present one with which all gradients of the backward are finite.

        A backward is in proportion to what it is given. None where no float16 takes part, whose range is the reason to
        scale, or where nothing was shown; a cure that does not work where the scale is known and a scale of 1 does not
        help either.
        """
        scale = self._trials.conditions.loss_scale
        given = self._seen.given
        if not any(record.dtype == "float16" for record in (*given, *self._seen.gradients)):
            return None

        @cache
        def room(divisor: float) -> float:
            made = self._run(divisor=divisor).gradients
            if any(record.isfinite is False for record in made):
                return -inf
            bits = least_bits(record for record in made if record.dtype == "float16")
            return inf if bits is None else bits

        most = min(_LARGEST_DIVISOR if scale is None else scale, _largest_divisor(given))
        if most <= 1:
            return None
        divisor, words = most, "a loss scale that is {:g} times smaller"
        if room(most) >= _LEAST_ROOM:
            divisors = [*(2.0**i for i in range(1, ceil(log2(most)))), most]
            divisor = divisors[bisect_left(divisors, True, key=lambda x: room(x) >= _LEAST_ROOM)]
        bits = room(divisor)
        if bits == -inf and divisor != scale:
            return None
        if scale is not None:
            words = f"a loss scale of {scale / divisor:g} in place of {scale:g}"
        return Cure(words.format(divisor), bits >= _LEAST_ROOM, bits if isfinite(bits) else None)

    # One trial and what it means

    def _run(
        self,
        hold: Hold = nullcontext,
        make: MakeCall = make_call,
        snapshot: BatchSnapshot | None = None,
        divisor: float = 1.0,
    ) -> Experiment:
        trials = self._trials
        is_enough = sum(cure.works for cure in trials.cures) >= _ENOUGH
        if not self._is_backward and (trials.runs >= MAX_RUNS or is_enough):
            raise _Done
        # Gradients of float16 weights have no scaler: a loss that grows with the square of the outputs has to fit.
        is_half = any(p.dtype is torch.float16 for p in trials.snapshot.module.parameters())
        is_changed = hold is not nullcontext or make is not make_call
        squares = is_half and is_changed and not self._is_backward
        return trials.run(hold, make, snapshot, squares=squares, divisor=divisor)

    def _judge(
        self,
        what: str,
        experiment: Experiment,
        *,
        changed: str | None = None,
        is_expected: bool = False,
        needs_room: bool = True,
    ) -> bool:
        """Keep it as a cure if it works, or if a user would expect it to. Return whether it works.

        `changed` is the module that runs in float32 and gives its results back in the format around it.
        """
        remarks = self._trials.remarks
        if experiment.error is not None:
            remarks.append(f"could not try to {what}: {spell(experiment.error)}")
            return False
        works, room = self._trials.is_finite(experiment), None
        if works and needs_room:
            narrow = [x for x in experiment.gradients if x.dtype in ("float16", "bfloat16")]
            outputs = [x for x in experiment.records(changed) if x.role == "output"]
            room = least_bits(narrow if self._is_backward else [*self._failing(experiment), *outputs])
            works = room is None or room >= _LEAST_ROOM
        if works:
            works, effect = self._trials.agreement(experiment)
            if not works:
                remarks.append(f"with a change the batch is finite, but {effect}: {what}")
        if works or is_expected:
            self._trials.cures.append(Cure(what, works, room))
        return works

    def _failing(self, experiment: Experiment) -> list[Record]:
        """Return the records of the value of the finding."""
        finding = self._trials.finding
        return [x for x in experiment.records(finding.module) if x.label == finding.label]

    def _is_narrow(self) -> bool:
        """Return whether a narrow format takes part in the guilty call, or in the record that was not finite."""
        finding = self._trials.finding
        calls = [call for call in self._seen.calls if call.name in (self._guilty, finding.module)]
        weights = self._modules[self._guilty].parameters() if self._guilty in self._modules else ()
        records = [*finding.operands, *(record for call in calls for record in call.records)]
        dtypes = [*(record.dtype for record in records), *(str(x.dtype) for x in weights)]
        return any(call.autocast is not None for call in calls) or any(map(is_narrow, dtypes))

    def _around(self) -> Iterator[str]:
        """Return the modules around the guilty one that this batch called, the nearest first."""
        called = {call.name for call in self._seen.calls}
        name = self._guilty
        while name and name != self._root:
            name = name.rpartition(".")[0]
            if name in self._modules and self._trials.names[self._modules[name]] in called:
                yield self._trials.names[self._modules[name]]


def _under_bfloat16(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call with bfloat16 where autocast has float16: here, as a model may enter autocast in its own forward."""
    with ExitStack() as modes:
        for kind in autocast_kinds():
            if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16:
                modes.enter_context(torch.autocast(kind, torch.bfloat16, cache_enabled=False))
        return make_call(module, args, kwargs)


def _clamping(chosen: nn.Module, side: str, limit: float) -> MakeCall:
    """Return what makes calls with the floating-point tensors of one side of a module clamped to ±limit."""

    def clamped(value: Any) -> Any:
        return replaced(value, lambda x: x.clamp(-limit, limit) if x.dtype.is_floating_point else None)

    def make(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module is chosen and side == "input":
            args, kwargs = clamped((args, kwargs))
        output = make_call(module, args, kwargs)
        return clamped(output) if module is chosen and side == "output" else output

    return make


def _largest_divisor(given: Sequence[Record]) -> float:
    """Return by how much these may be divided before the largest element of one becomes subnormal."""
    divisors = [x.abs_max / ends.smallest_normal for x in given if x.abs_max and (ends := x.ends) is not None]
    # Rounded down to a power of two, for a division that rounds nothing.
    return max(1.0, 2.0 ** (frexp(min(*divisors, _LARGEST_DIVISOR))[1] - 1)) if divisors else 1.0


# Modules in words


def module_words(name: str) -> str:
    """Return the module in prose."""
    return f"`{name}`" if name else "the model"


def code_of(model: nn.Module, name: str) -> str:
    """Return the expression that reaches the module in Python: `model.decoder.block[0]`."""
    path = next(
        (named.path for named in named_modules(model, remove_duplicate=False) if named.name == name), name
    )
    code, module = "model", model
    for part in path.split(".") if path else ():
        if isinstance(module, nn.ModuleList | nn.Sequential) and part.isdecimal():
            code += f"[{part}]"
        elif isinstance(module, nn.ModuleDict):
            code += f"[{part!r}]"
        elif part.isidentifier():
            code += f".{part}"
        else:
            return f"model.get_submodule({path!r})"
        module = module._modules[part]  # type: ignore[assignment]
    return code
