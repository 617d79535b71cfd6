"""Cures for a failure that a wider number format may end: each tried on the batch that failed, run once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..instrumentation.wrapped_names import module_names, named_modules, unwrapped
from ..precision.casting import NARROW, cast
from ..precision.precision import run_in_fp32
from ..recording.walk import call_leaves
from ..records.headroom import least_bits
from ..records.record import Record
from ..report.finding import Cure, Finding, working_first
from ..util.visible import spell
from .batch_snapshot import BatchSnapshot, is_narrow, may_be_narrow, no_second_run
from .experiment import NO_CONDITIONS, Change, Conditions, Experiment, in_float32, loaded, module_words, run
from .float64 import agreement, results_in_float64

MAX_RUNS = 5
# Two are a choice; more would only cost forwards.
ENOUGH = 2
# A value within 2 % of the end of one format may be past it after the roundings of another.
_MARGIN = 1.02
# Bits. With less, the next batch whose values are twice as large fails again.
_LEAST_ROOM = 1.0
_LOSS_SCALE_STEP = 256
_NOT_BACK = "no cure was tried: the failure did not come back when the batch ran again"


def try_cures(
    snapshot: BatchSnapshot,
    finding: Finding,
    model: nn.Module,
    *,
    conditions: Conditions = NO_CONDITIONS,
    most_runs: int = MAX_RUNS,
) -> tuple[tuple[Cure, ...], tuple[str, ...]]:
    """Return `(cures, remarks)` from running the batch of `snapshot` again, at most `most_runs` times.

    Only where a format narrower than float32 takes part in what a module produced or received; for weights, buffers
    and data that were not finite before the call there is no cure here. `model` is the watched model, in which
    `finding` names the modules. The loss scale is tried where the batch was called with it.

    A cure works when all that the modules are given and give is finite, at least one bit of room is left, and the
    results are near those of float64, where these are finite. Each experiment changes what a user would change who
    applies the cure as it is printed. A change that does not work is left out, except float32 for the guilty module,
    which a user would expect to help. Cures that work come first.

    The model is left as it was. Nothing is raised but KeyboardInterrupt and its like: what goes wrong is a remark.
    """
    if finding.origin not in ("produced", "received"):
        return (), ()
    if finding.transient:
        return (), (_NOT_BACK,)
    if reason := no_second_run(snapshot.module):
        return (), (f"no cure was tried: {reason}",)
    cures: list[Cure] = []
    remarks: list[str] = []
    try:
        _Search(snapshot, finding, model, conditions, most_runs, cures, remarks).go()
    except _Done:
        pass
    except Exception as error:
        remarks.append(f"the search for cures ended early: {spell(error)}")
    return working_first(cures), tuple(remarks)


class _Done(Exception):  # noqa: N818
    """Enough cures are found, or all runs are used."""


@dataclass
class _Search:
    """The experiments for one finding; what they give goes to `cures` and `remarks`."""

    snapshot: BatchSnapshot
    finding: Finding
    model: nn.Module
    conditions: Conditions
    most_runs: int
    cures: list[Cure]
    remarks: list[str]

    def __post_init__(self) -> None:
        finding = self.finding
        self.runs = 0
        named = named_modules(self.model, remove_duplicate=False)
        self.modules = {one.name: one.module for one in named}
        self.names = module_names(self.model)
        self.root = self.names.get(unwrapped(self.snapshot.module), "")
        # For a value that was handed in: the module in whose forward it was made.
        made_by = finding.module if finding.origin == "produced" else finding.source_module
        self.guilty = self.root if made_by is None else made_by
        # Results of the batch in float64, empty where they are not known.
        self.truth: list[Tensor] | None = None
        # How the batch ran with nothing changed, or with nothing but the guilty module: what came before is the same.
        self.seen = Experiment()

    def go(self) -> None:
        """Try one after the other, the smallest change first."""
        if self.finding.transient is None or not may_be_narrow(self.snapshot, self.finding):
            self.seen = self._run()
            if not any(row.is_fault for row in self._records(self.seen)):
                error = self.seen.error
                self.remarks.append(
                    f"no cure was tried: the batch, run again, raised {spell(error)}" if error else _NOT_BACK
                )
                return
            if not self._is_narrow():
                return
        alone = self._run(lambda: run_in_fp32(self.modules[self.guilty]))
        if not self.seen.calls:
            # An experiment that raised has not seen the guilty call to its end.
            self.seen = alone if alone.error is None else self._run()
            if not self._is_narrow():
                return
        works = self._judge(in_float32(self.model, self.guilty), alone, changed=self.guilty, expected=True)
        wide = self._bfloat16()
        if not works:
            self._larger(wide)
        if wide is None:
            self._clamp()
        self._smaller_loss_scale()

    def _bfloat16(self) -> Experiment | None:
        """Try bfloat16, which has the range of float32, for all float16. Return the experiment if it works."""
        autocast = any(call.autocast is torch.float16 for call in self.seen.calls)
        weights = any(p.dtype is torch.float16 for p in self.snapshot.module.parameters())
        given = any(
            isinstance(x, Tensor) and x.dtype is torch.float16
            for _, x in call_leaves(self.snapshot.args, self.snapshot.kwargs)
        )
        if weights and given and self.root:
            # The batch is a call of a part. The code that hands float16 to it was not seen, so no run here shows
            # whether that code hands on bfloat16 once the model is in bfloat16.
            return None
        what = []
        if autocast:
            kind = next((one.device_type for one in self.snapshot.autocast if one.enabled), "cuda")
            what.append(f'use bfloat16 in autocast, torch.autocast("{kind}", dtype=torch.bfloat16)')
        if weights:
            inputs = ", and give it bfloat16 inputs" if given else ""
            what.append(f"load the weights in bfloat16, model.to(torch.bfloat16){inputs}")
        if not what:
            return None
        change = Change(autocast=torch.bfloat16)
        experiment = (
            self._run_loaded((torch.float16,), torch.bfloat16, change)
            if weights
            else self._run(change=change)
        )
        return experiment if self._judge(" and ".join(what), experiment) else None

    def _whole(self) -> tuple[str, Experiment]:
        """Return the outermost call in float32, in words and as an experiment."""
        if self.root:
            # Its caller goes on in the format that it gave.
            return in_float32(self.model, self.root), self._run(lambda: run_in_fp32(self.modules[self.root]))
        change = Change(autocast=torch.float32)
        return (
            "run the whole of it in float32, without autocast and with float32 weights",
            self._run_loaded(NARROW, torch.float32, change),
        )

    def _larger(self, wide: Experiment | None) -> None:
        """Try the modules around the guilty one in float32, the smallest first.

        `wide` is a run in which all had the range of float32. It shows how large everything becomes, and so which
        modules cannot be enough, as what they hand out would not fit the format it is given back in.
        """
        whole = None
        is_tried = bool(self.root) and self.guilty == self.root
        if wide is None:
            if is_tried:
                return
            whole = self._whole()
            wide = whole[1]
            if wide.error is None and not self._is_finite(wide):
                return
        for name in self._ancestors():
            # The whole is known to work already, or tried below.
            if self.runs < self.most_runs and self._would_fit(name, wide):
                experiment = self._run(lambda name=name: run_in_fp32(self.modules[name]))  # type: ignore[misc]
                if self._judge(in_float32(self.model, name), experiment, changed=name):
                    return
        if any(call.name == self.guilty and call.autocast for call in self.seen.calls):
            leaf = self.modules[self.guilty]
            experiment = self._run(lambda: run_in_fp32(leaf, cast_output=False))
            if self._judge(in_float32(self.model, self.guilty, cast_output=False), experiment):
                return
        if whole is None and self.root and not is_tried and self.runs < self.most_runs:
            whole = self._whole()
        if whole is not None:
            self._judge(*whole, changed=self.root or None)

    def _clamp(self) -> None:
        """Try to clamp the value that leaves float16 to its ends, where bfloat16 is not to be had."""
        rows = self._records(self.seen)
        ends = next((row.ends for row in rows if row.is_fault and row.dtype.endswith("float16")), None)
        if ends is None or any(call.name == self.guilty and call.autocast for call in self.seen.calls):
            return
        name, side = self.finding.module, self.finding.label.partition("[")[0]
        module = self.modules.get(name)
        if module is None or side not in ("input", "output"):
            return
        experiment = self._run(change=Change(clamp=(module, side, ends.largest)))
        self._judge(
            f"clamp the {side} of {module_words(name)} to ±{ends.largest:g}", experiment, is_at_end=True
        )

    def _smaller_loss_scale(self) -> None:
        """Try a smaller loss scale, if the batch was called with one."""
        scale = self.conditions.loss_scale
        if scale is None or scale <= 1:
            return
        smaller = max(1.0, scale / _LOSS_SCALE_STEP)
        args = tuple(_scaled(x, scale, smaller) for x in self.snapshot.args)
        kwargs = {name: _scaled(x, scale, smaller) for name, x in self.snapshot.kwargs.items()}
        changed = zip(
            (*args, *kwargs.values()), (*self.snapshot.args, *self.snapshot.kwargs.values()), strict=True
        )
        if any(new is not old for new, old in changed):
            experiment = self._run(snapshot=replace(self.snapshot, args=args, kwargs=kwargs))
            self._judge(f"a loss scale of {smaller:g} in place of {scale:g}", experiment, is_scaled=True)

    # One experiment and what it means

    def _run(
        self,
        hold: Callable[[], AbstractContextManager[Any]] = nullcontext,
        change: Change | None = None,
        snapshot: BatchSnapshot | None = None,
    ) -> Experiment:
        if self.runs >= self.most_runs or sum(cure.works for cure in self.cures) >= ENOUGH:
            raise _Done
        self.runs += 1
        with hold():
            return run(
                snapshot or self.snapshot,
                self.names,
                change,
                allows=self.conditions.allows,
                backward=self.conditions.gradients and self.snapshot.grad,
            )

    def _run_loaded(self, sources: tuple[torch.dtype, ...], to: torch.dtype, change: Change) -> Experiment:
        """Run the batch as after `model.to(to)`, with its inputs of the dtypes `sources` in `to` as well."""
        args = cast(self.snapshot.args, sources, to)
        kwargs = cast(dict(self.snapshot.kwargs), sources, to)
        snapshot = replace(self.snapshot, args=args, kwargs=kwargs, cached={})
        return self._run(lambda: loaded(self.snapshot.module, to), change, snapshot)

    def _judge(
        self,
        what: str,
        experiment: Experiment,
        *,
        changed: str | None = None,
        expected: bool = False,
        is_at_end: bool = False,
        is_scaled: bool = False,
    ) -> bool:
        """Keep it as a cure if it works, or if a user would expect it to. Return whether it works.

        `changed` is the module that runs in float32 and gives its results back in the format around it. `is_at_end`:
        the change leaves values at the end of their format, so that no room is asked of it. `is_scaled`: so are the
        results, and they are compared with nothing.
        """
        if experiment.error is not None:
            self.remarks.append(f"could not try to {what}: {spell(experiment.error)}")
            return False
        is_finite = self._is_finite(experiment)
        room = self._room(experiment, changed) if is_finite and not is_at_end else None
        works = is_finite and (room is None or room >= _LEAST_ROOM)
        if works and not is_scaled:
            if self.truth is None:
                self.truth = results_in_float64(self.snapshot) or []
            close = agreement(experiment.results, self.truth or None)
            if not close.is_close:
                self.remarks.append(f"with a change the batch is finite, but {close.words}: {what}")
            works = close.is_close
        if works or expected:
            self.cures.append(Cure(what, works, room))
        return works

    def _is_finite(self, experiment: Experiment) -> bool:
        if experiment.error is not None or not self._records(experiment):
            return False
        return set(experiment.nonfinite()) <= self._excused() and not experiment.bad_gradients

    def _room(self, experiment: Experiment, changed: str | None) -> float | None:
        """Return bits between the largest value and the end of its format, in the record that was not finite and in the
        results of the changed module.
        """
        rows = self._records(experiment)
        rows += experiment.outputs(changed)
        return least_bits(rows)

    def _excused(self) -> set[tuple[str, str]]:
        """Return the records that were non-finite before the finding: infinities that are meant."""
        excused: set[tuple[str, str]] = set()
        for call in self.seen.calls:
            if call.name == self.finding.module:
                break
            excused |= {(call.name, row.label) for row in call.rows if row.is_fault}
        return excused

    def _records(self, experiment: Experiment) -> list[Record]:
        return experiment.rows(self.finding.module, self.finding.label)

    # Facts that need no run

    def _is_narrow(self) -> bool:
        """Return whether a narrow format takes part in the guilty call, or in the record that was not finite."""
        guilty = [call for call in self.seen.calls if call.name in (self.guilty, self.finding.module)]
        weights = self.modules[self.guilty].parameters() if self.guilty in self.modules else ()
        return (
            any(call.autocast is not None for call in guilty)
            or any(is_narrow(row.dtype) for call in guilty for row in call.rows)
            or any(is_narrow(str(x.dtype)) for x in weights)
            or any(is_narrow(record.dtype) for record in self.finding.operands)
        )

    def _ancestors(self) -> Iterator[str]:
        """Return the modules around the guilty one that this batch called, the nearest first, without the root."""
        called = {call.name for call in self.seen.calls}
        name = self.guilty
        while name:
            name = name.rpartition(".")[0]
            own = self.names[self.modules[name]]
            if own == self.root:
                return
            if own in called:
                yield own

    def _would_fit(self, name: str, wide: Experiment) -> bool:
        """Return whether the results of the module fit the format to which they would be cast back."""
        given = next((call.given for call in self.seen.calls if call.name == name), None)
        if given not in NARROW:
            return True
        end = torch.finfo(given).max
        return all(row.abs_max is None or row.abs_max * _MARGIN <= end for row in wide.outputs(name))


def _scaled(x: Any, scale: float, smaller: float) -> Any:
    """Return `smaller` if `x` is the loss scale, as the same kind of number, else `x` itself."""
    if isinstance(x, Tensor):
        is_scale = x.numel() == 1 and x.dtype.is_floating_point and x.item() == scale
        return torch.full_like(x, smaller) if is_scale else x
    return smaller if isinstance(x, float | int) and not isinstance(x, bool) and x == scale else x
