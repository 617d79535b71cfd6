"""Options of `watch` that are said without code: in NANWATCH_OPTIONS, and in nanwatch.toml or pyproject.toml.

The environment goes before the code, for whoever runs the job. The code goes before the file.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ..util.visible import close_names
from .option_kinds import SWITCH
from .options import Options

VARIABLE = "NANWATCH_OPTIONS"
# The tables that may hold options, by file name; the first file found, from the current folder upwards, is the one.
TABLES: dict[str, tuple[str, ...]] = {"nanwatch.toml": (), "pyproject.toml": ("tool", "nanwatch")}
CODE, DEFAULT = "code", "default"
FIELDS: dict[str, Field[Any]] = {one.name: one for one in fields(Options)}
_HELP = "`nanwatch options` lists them"
_WORDS = {"true": True, "false": False, "none": None}


class Said(NamedTuple):
    """A value of an option, and where it was said: CODE, DEFAULT, NANWATCH, NANWATCH_OPTIONS or a file's path."""

    value: Any
    source: str


def in_force(given: Mapping[str, Any]) -> dict[str, Said]:
    """Return every option of `watch` as it is in force for these options of the code.

    What is said outside of the code is checked here, so that its error names the place. Raises ValueError for it, and
    TypeError for a name in `given` that is no option.
    """
    for name in given:
        if name not in FIELDS:
            raise TypeError(f"watch has no option {name!r}; {close_names(name, FIELDS, _HELP)}")
    said = {name: Said(one.default, DEFAULT) for name, one in FIELDS.items()}
    said |= _of_file()
    said |= {name: Said(value, CODE) for name, value in given.items()}
    said |= _of_environment()
    if os.environ.get(SWITCH):
        said["enabled"] = Said(FIELDS["enabled"].metadata["check"]("enabled", True), SWITCH)
    return said


def values_in_force(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `in_force`."""
    return {name: one.value for name, one in in_force(given).items()}


def without_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from their defaults, for a caller who cannot know which ones the code has said."""
    return {name: value for name, value in given.items() if not _is_default(value, FIELDS[name].default)}


def _is_default(value: Any, default: Any) -> bool:
    """Return whether the value is the default. Nothing of an object of the user is called."""
    return value is default or (
        type(value) in (int, float, str, tuple) and type(value) is type(default) and value == default
    )


def _of_environment() -> dict[str, Said]:
    """Return what NANWATCH_OPTIONS says, such as "gradients=true output_dir=out"."""
    text = os.environ.get(VARIABLE, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text!r} cannot be split into words: {error}") from None
    said = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(
                f"{VARIABLE} has {word!r}; write option=value, such as gradients=true output_dir=out"
            )
        said[name] = Said(_checked(name, value, VARIABLE, is_text=True), VARIABLE)
    return said


def _of_file() -> dict[str, Said]:
    """Return what the nearest file with options says. Paths in it are relative to the folder of the file."""
    try:
        folder = Path.cwd()
    except OSError:  # it has been removed
        return {}
    for path, keys in _candidates(folder):
        table = _table(path, keys)
        if table is None:
            continue
        said = {}
        for name, value in table.items():
            is_path = name in FIELDS and FIELDS[name].metadata["flag"].get("metavar") in ("PATH", "DIR")
            if is_path and isinstance(value, str):
                value = str(path.parent / value)
            said[name] = Said(_checked(name, value, str(path), is_text=False), str(path))
        return said
    return {}


def _candidates(folder: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    for above in (folder, *folder.parents):
        for name, keys in TABLES.items():
            if os.path.isfile(path := above / name):
                yield path, keys


def _table(path: Path, keys: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the table of options in a file, None where it has none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if keys:  # a file of other tools, which may have said so
            return None
        raise ValueError(f"{path} cannot be read: {error}") from None
    if ".".join(keys) not in text:
        return None
    try:
        toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise ValueError(
            f"{path} may hold options of nanwatch, and Python 3.10 reads no TOML; install tomli, or use {VARIABLE}"
        ) from None
    try:
        found: Any = toml.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no TOML: {error}") from None
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"{path}: {'.'.join(keys)} should be a table of options, got {found!r}")
    return found


def _checked(name: str, value: Any, source: str, *, is_text: bool) -> Any:
    """Return the value of an option that `source` says, read from text where it is text."""
    one = FIELDS.get(name)
    if one is None:
        raise ValueError(f"{source}: there is no option {name!r}; {close_names(name, FIELDS, _HELP)}")
    if not (flag := one.metadata["flag"]) and name != "enabled":
        raise ValueError(f"{source}: {name} takes an object, which only code can give")
    try:
        if is_text:
            value = _read(value, flag)
        one.metadata["check"](name, value)
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"{source}: {error}") from None
    return value


def _read(text: str, flag: dict[str, Any]) -> Any:
    """Return the value that a text means for an option with this flag; text that means none is left to its check."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if flag.get("action") == "append":
        return tuple(filter(None, text.split(",")))
    if "type" in flag:
        try:
            return flag["type"](text)
        except ValueError:
            return text
    if flag.get("action") is argparse.BooleanOptionalAction and text in ("0", "1"):
        return text == "1"
    return text
