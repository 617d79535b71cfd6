"""Checks of option values: each returns the value to keep, or raises TypeError or ValueError with what is accepted."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable
from errno import EDQUOT, ENOSPC
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ..monitoring.backends import ACCEPTED, is_target
from ..util.reading import shorten

ACTIONS = ("raise", "warn", "record")
CHECKS = ("auto", "module", "batch", "async")
SWITCH = "NANWATCH"
# Batches are counted in 64 bits; sums and differences of two such numbers stay in them.
MAX_BATCH = 2**62 - 1
_MAX_SECONDS = 86_400


def whole_from(least: int, most: int) -> Callable[[str, Any], int]:
    """Return a check for whole numbers from `least` to `most`."""
    return lambda option, value: whole(option, value, least, most)


def flag(option: str, value: Any) -> bool:
    """Return True or False as it is."""
    if not isinstance(value, bool):
        raise TypeError(f"{option} should be True or False, got {value!r}")
    return value


def action(option: str, value: Any) -> Any:
    """Return a value of `on_nonfinite`."""
    if not callable(value) and value not in ACTIONS:
        raise ValueError(
            f'{option} should be "raise", "warn", "record" or a callable that takes the Report, got {value!r}'
        )
    return value


def when_to_check(option: str, value: Any) -> Any:
    """Return a value of `check`."""
    if value not in CHECKS:
        raise ValueError(f'{option} should be "auto", "module", "batch" or "async", got {value!r}')
    return value


def batch_or_none(option: str, value: Any) -> int | None:
    """Return the number of a batch, or None."""
    return None if value is None else whole(option, value, 0, MAX_BATCH)


def batches(option: str, value: Any) -> frozenset[int]:
    """Return the numbers of batches."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{option} should be a collection of batch numbers such as (0, 3), got {value!r}")
    return frozenset(whole(f"each of {option}", batch, 0, MAX_BATCH) for batch in value)


def patterns(option: str, value: Any) -> tuple[str, ...]:
    """Return one pattern or several as a tuple."""
    several = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else None
    if several is None or not all(isinstance(pattern, str) for pattern in several):
        raise TypeError(f"{option} should be a pattern or several, such as 'encoder.block.*', got {value!r}")
    return several


def seconds(option: str, value: Any) -> float:
    """Return a number of seconds of at most a day."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if number is None:
        raise TypeError(f"{option} should be a number of seconds, 0 for none, got {value!r}")
    if not 0 <= number <= _MAX_SECONDS:
        raise ValueError(f"{option} should be from 0 to {_MAX_SECONDS:,} seconds, got {number}")
    return float(number)


def flag_or_none(option: str, value: Any) -> bool | None:
    """Return True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{option} should be True, False or None, got {value!r}")
    return value


def grad_scaler(option: str, value: Any) -> Any:
    """Return a GradScaler, or None."""
    if value is not None and not callable(getattr(value, "get_scale", None)):
        raise TypeError(f"{option} should be a torch.amp.GradScaler or None, got {type(value).__name__}")
    return value


def optimizer(option: str, value: Any) -> Optimizer | None:
    """Return an optimizer, or None."""
    if value is not None and not isinstance(value, Optimizer):
        raise TypeError(f"{option} should be a torch.optim.Optimizer or None, got {type(value).__name__}")
    return value


def log_target(option: str, value: Any) -> Any:
    """Return what monitoring can log to: a path comes absolute."""
    if isinstance(value, str | os.PathLike):
        return check_place(option, value)
    if value is not None and not is_target(value):
        raise TypeError(f"{option} should be {ACCEPTED}, got {shorten(value)}")
    return value


def switch(option: str, value: Any) -> bool:
    """Return what the environment says, which goes before the code."""
    enabled, word = flag(option, value), os.environ.get(SWITCH, "")
    if word not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}={word!r} is not understood; set it to 1 (watch) or 0 (do not watch)")
    return enabled if word == "" else word == "1"


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
