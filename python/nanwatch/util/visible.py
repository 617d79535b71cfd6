"""Words for people made of names from strangers: what a terminal, a log or a page would obey is spelt out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def visible(text: str) -> str:
    r"""Return `text` with an escape such as `\x1b` for each character that is not printable, as repr() spells it.

    All text that nanwatch prints, logs or writes for people goes through here, line by line: names of modules and
    classes, labels, notes and errors may hold anything. An escape sequence would colour or clear a terminal, a newline
    forge a line of a log, and a bidirectional mark turn text around. Letters of any script stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def with_utf8(text: str) -> str:
    """Return `text` with an escape for each lone surrogate: for C++ and Parquet, whose text is UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def spell(error: BaseException) -> str:
    """Return the class of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return visible(f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__)


def close_names(wanted: str, names: Iterable[str]) -> str:
    """Return a hint for a misspelt name: the closest ones, else where to look for names."""
    close = difflib.get_close_matches(wanted, list(names), n=3)
    return visible(f"close names: {', '.join(close)}") if close else "see model.named_modules() for the names"


# Wrappers put these before the names of the modules that they hold.
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def without_wrappers(name: str) -> str:
    """Return the name of a module in the model itself, without the parts that DistributedDataParallel adds."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def module_name(name: str) -> str:
    """Return the name of a module for prose. The root has none of its own."""
    return visible(name) or "the root module"
