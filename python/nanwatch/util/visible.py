"""Text of strangers made safe to show: what a terminal, a log or a page would obey is spelt out."""

from __future__ import annotations


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
