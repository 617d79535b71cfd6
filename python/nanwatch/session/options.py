"""The options of `watch`: what each may be, and the error that says so when it is something else."""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from errno import EDQUOT, ENOSPC
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.wrapped_names import for_names
from ..monitoring.backends import ACCEPTED, is_target
from ..recording.listener import Check, Settings
from ..recording.masked_scores import masked_scores
from ..report.text import close_names
from ..util.reading import shorten

if TYPE_CHECKING:
    from ..recording.masked_scores import MaskedScores
    from ..report.report import Report

OnNonfinite: TypeAlias = "Literal['raise', 'warn', 'record'] | Callable[[Report], object]"
ACTIONS = ("raise", "warn", "record")
CHECKS = ("auto", "module", "batch", "async")
SWITCH = "NANWATCH"
# A frame of a small call takes 2 kB and is made into text when a report is written: more than this is no report.
MAX_FRAMES = 1_000_000
# Batches are counted in 64 bits; sums and differences of two such numbers stay in them.
MAX_BATCH = 2**62 - 1
_MAX_SECONDS = 86_400
# Defaults of `watch` that are compared with what was given.
MAX_SKIPPED_STEPS, LOG_EVERY, REREAD_WEIGHTS = 20, 50, 64


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `watch`, checked; `watch` says what they mean."""

    max_frames: int
    on_nonfinite: OnNonfinite
    check: Check
    weights: bool
    buffers: bool
    inputs: bool
    outputs: bool
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    allow_inf: tuple[str, ...]
    every: int
    reread_weights: int
    trace_batches: frozenset[int]
    trace: Path | None
    log_to: Any
    log_every: int
    forecast: bool
    abort_after_batch: int | None
    microscope: bool | None
    output_dir: Path | None
    peer_timeout: float
    enabled: bool
    gradients: bool
    counts: bool
    max_skipped_steps: int
    scaler: Any
    optimizer: Optimizer | None

    def observes(self, name: str) -> bool:
        """Whether the calls of the module of this name are recorded."""
        return (not self.include or _matches(name, self.include)) and not _matches(name, self.exclude)

    def allows_inf(self, name: str, module: nn.Module) -> bool | MaskedScores:
        """Whether infinities in this module are meant, or the masked scores that are, of a softmax."""
        return _matches(name, self.allow_inf) or masked_scores(module, self.inputs)

    def recorder_settings(self, *, max_frames: int, verify_hits: bool, measure_time: bool) -> Settings:
        """Return the settings of a recorder for these options; it may hold more frames than are shown."""
        return Settings(
            max_frames=max_frames,
            every=self.every,
            traced=tuple(self.trace_batches),
            weights=self.weights,
            buffers=self.buffers,
            inputs=self.inputs,
            outputs=self.outputs,
            reread_weights=self.reread_weights,
            verify_hits=verify_hits,
            measure_time=measure_time,
            gradients=self.gradients,
            counts=self.counts,
            check=self.check,
        )


def check_options(names: Sequence[str], given: dict[str, Any]) -> Options:
    """The options for a model whose modules have these names. TypeError or ValueError for what means nothing."""
    flags = {option: given[option] for option in ("weights", "buffers", "inputs", "outputs")}
    switches = {name: given[name] for name in ("gradients", "counts", "forecast", "enabled")}
    for option, flag in {**flags, **switches}.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{option} should be True or False, got {flag!r}")
    if not any(flags.values()):
        raise ValueError("weights, buffers, inputs and outputs are all False; leave one of them True")
    if given["gradients"] and not given["outputs"]:
        raise ValueError("gradients=True follows the graph from the outputs of modules; leave outputs=True")
    action, check, last = given["on_nonfinite"], given["check"], given["abort_after_batch"]
    if not callable(action) and action not in ACTIONS:
        raise ValueError(
            f'on_nonfinite should be "raise", "warn", "record" or a callable that takes the Report, got {action!r}'
        )
    if check not in CHECKS:
        raise ValueError(f'check should be "auto", "module", "batch" or "async", got {check!r}')
    include, exclude, allow_inf = (
        tuple(for_names(pattern, names) for pattern in _patterns(option, given[option]))
        for option in ("include", "exclude", "allow_inf")
    )
    options = Options(
        **flags,
        max_frames=whole("max_frames", given["max_frames"], 1, MAX_FRAMES),
        on_nonfinite=action,
        check=check,
        include=include,
        exclude=exclude,
        allow_inf=allow_inf,
        every=whole("every", given["every"], 1, MAX_BATCH),
        reread_weights=whole("reread_weights", given["reread_weights"], 1, MAX_BATCH),
        trace_batches=_batches("trace_batches", given["trace_batches"]),
        trace=check_place("trace", given["trace"]),
        log_to=_log_target(given["log_to"]),
        log_every=whole("log_every", given["log_every"], 1, MAX_BATCH),
        forecast=given["forecast"],
        microscope=_microscope(given["microscope"]),
        output_dir=check_place("output_dir", given["output_dir"]),
        peer_timeout=_seconds("peer_timeout", given["peer_timeout"]),
        abort_after_batch=None if last is None else whole("abort_after_batch", last, 0, MAX_BATCH),
        enabled=_switch(given["enabled"]),
        gradients=given["gradients"],
        counts=given["counts"],
        max_skipped_steps=whole("max_skipped_steps", given["max_skipped_steps"], 0, MAX_BATCH),
        scaler=_scaler(given["scaler"]),
        optimizer=_optimizer(given["optimizer"]),
    )
    if left_out := sorted(batch for batch in options.trace_batches if batch % options.every):
        listed = ", ".join(map(str, left_out[:5])) + (", ..." if len(left_out) > 5 else "")
        raise ValueError(
            f"trace_batches has {listed}, and every={options.every} looks only at batches whose number is a multiple"
            f" of {options.every}; trace such batches, or set every=1"
        )
    _check_effects(options)
    for option, patterns in (("include", options.include), ("allow_inf", options.allow_inf)):
        _check_matches(option, patterns, names)
    if not any(options.observes(name) for name in names):
        raise ValueError(
            f"include={options.include!r} and exclude={options.exclude!r} leave no module to watch; loosen one of them"
        )
    return options


def _check_effects(options: Options) -> None:
    """ValueError for an option that was set and does nothing by itself."""
    reads_weights = options.weights or options.buffers
    for option, is_set, has_effect, needed in (
        ("scaler", options.scaler is not None, options.gradients, "gradients=True"),
        (
            "max_skipped_steps",
            options.max_skipped_steps != MAX_SKIPPED_STEPS,
            options.gradients,
            "gradients=True",
        ),
        ("log_every", options.log_every != LOG_EVERY, options.log_to is not None, "log_to="),
        ("reread_weights", options.reread_weights != REREAD_WEIGHTS, reads_weights, "weights or buffers"),
    ):
        if is_set and not has_effect:
            raise ValueError(f"{option} has no effect without {needed}; set that too, or leave {option} out")


def check_place(option: str, value: Any) -> Path | None:
    """Return `value` as an absolute path at which something can be made, or None for None.

    Raises ValueError where nothing can, TypeError for what is no path. It makes a nameless file beside the first folder
    that is still to be made, and leaves nothing behind.
    """
    path = _folder(option, value) if option == "output_dir" else _file(option, value)
    if path is None:
        return None
    path = path.absolute()  # the run may change its folder
    folder = path if option == "output_dir" else path.parent
    try:
        folder = next(one for one in (folder, *folder.parents) if one.exists())
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):  # there may be room by then
            return path
        raise ValueError(
            f"{option} is {str(value)!r}, and nothing can be written in {str(folder)!r} ({error.strerror}); give"
            " another path"
        ) from error
    return path


def check_names(unknown: Iterable[str]) -> None:
    """TypeError for an option that there is not, naming those that there are and the closest."""
    accepted = [field.name for field in fields(Options)]
    for name in unknown:
        close = difflib.get_close_matches(name, accepted, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"watch() has no option {name!r}; it accepts {', '.join(accepted)}{hint}")


def check_model(model: object) -> None:
    """TypeError for what is no module whose calls can be seen."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"watch() needs a module, got the class {model.__name__}; pass {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch() needs a torch.nn.Module, got {type(model).__name__}; pass the model itself")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"watch() cannot hook the modules inside a {type(model).__name__};"
            " pass the model as it was before torch.jit"
        )


def whole(option: str, value: Any, least: int, most: int) -> int:
    """`value` as an int, if it is a whole number from `least` to `most`; numpy's integers are such numbers too."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{option} should be a whole number of at least {least}, got {value!r}")
    if number < least:
        raise ValueError(f"{option} should be at least {least}, got {number}")
    if number > most:
        raise ValueError(f"{option} should be at most {most}, got {_short(number)}")
    return number


def _seconds(option: str, value: Any) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if number is None:
        raise TypeError(f"{option} should be a number of seconds, 0 for none, got {value!r}")
    if not 0 <= number <= _MAX_SECONDS:
        raise ValueError(f"{option} should be from 0 to {_MAX_SECONDS:,} seconds, got {number}")
    return float(number)


def _microscope(value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"microscope should be True, False or None, got {value!r}")
    return value


def _scaler(value: Any) -> Any:
    if value is not None and not callable(getattr(value, "get_scale", None)):
        raise TypeError(f"scaler should be a torch.amp.GradScaler or None, got {type(value).__name__}")
    return value


def _optimizer(value: Any) -> Optimizer | None:
    if value is not None and not isinstance(value, Optimizer):
        raise TypeError(f"optimizer should be a torch.optim.Optimizer or None, got {type(value).__name__}")
    return value


def _log_target(value: Any) -> Any:
    if isinstance(value, str | os.PathLike):
        return check_place("log_to", value)
    if value is not None and not is_target(value):
        raise TypeError(f"log_to should be {ACCEPTED}, got {shorten(value)}")
    return value


def _file(option: str, value: Any) -> Path | None:
    path = _path(option, value, "file such as 'run.parquet', or of a folder,")
    if path is not None and not path.name:
        raise ValueError(f"{option} should be the path of a file or a folder with a name, got {value!r}")
    return path


def _path(option: str, value: Any, kind: str) -> Path | None:
    if value is None:
        return None
    if (
        not isinstance(value, str | os.PathLike)
        or not isinstance(os.fspath(value), str)
        or not os.fspath(value)
    ):
        raise TypeError(f"{option} should be the path of a {kind} or None, got {value!r}")
    return Path(value)


def _folder(option: str, value: Any) -> Path | None:
    folder = _path(option, value, "folder")
    if folder is None:
        return None
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ValueError(f"{option} should be a folder, and {str(folder)!r} is none")
    return folder


def _short(number: int) -> str:
    # Python refuses to spell an int of more than 4300 digits.
    return str(number) if number < 10**40 else f"a number of {number.bit_length()} bits"


def _batches(option: str, value: Iterable[int]) -> frozenset[int]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{option} should be a collection of batch numbers such as (0, 3), got {value!r}")
    return frozenset(whole(f"each of {option}", batch, 0, MAX_BATCH) for batch in value)


def _patterns(option: str, value: str | Iterable[str]) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else None
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{option} should be a pattern or several, such as 'encoder.block.*', got {value!r}")
    return patterns


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_matches(option: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{option} pattern {pattern!r} matches no module; {close_names(pattern, names)}")


def _switch(enabled: bool) -> bool:
    """The environment's word, which goes before the code's."""
    word = os.environ.get(SWITCH, "")
    if word not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}={word!r} is not understood; set it to 1 (watch) or 0 (do not watch)")
    return enabled if word == "" else word == "1"
