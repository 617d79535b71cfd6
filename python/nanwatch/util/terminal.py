"""The terminal that a program prints on."""

from __future__ import annotations

from typing import TextIO


def wants_color(file: TextIO) -> bool:
    """Return whether `file` is a terminal that shows colours, by rich's judgement; False without rich."""
    try:
        from rich.console import Console
    except ImportError:
        return False
    console = Console(file=file)
    return console.is_terminal and not console.no_color and console.color_system is not None
