"""Entry points of inference engines, which start the plugins of every package in each of their processes.

Without NANWATCH=1 they import no part of a watch.
"""

from __future__ import annotations

import os
from importlib import import_module


def vllm() -> None:
    """Start the plugin for vLLM."""
    _start("vllm")


def sglang() -> None:
    """Start the plugin for SGLang."""
    _start("sglang")


def _start(engine: str) -> None:
    if os.environ.get("NANWATCH") == "1":
        import_module(f"nanwatch.integrations.{engine}").register()
