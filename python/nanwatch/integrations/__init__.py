"""nanwatch inside the trainers and engines of other libraries, and the DebugUnderflowOverflow drop-in.

Nothing of theirs is imported before it is asked for. TensorBoard and W&B are in `sinks`. Inference engines start the
plugins of every package in each of their processes: without NANWATCH=1 no part of a watch is imported.
"""

from __future__ import annotations

import os
from importlib import import_module


def start_in_vllm() -> None:
    """Start the plugin for vLLM."""
    if os.environ.get("NANWATCH") == "1":
        import_module("nanwatch.integrations.serving").start_in_vllm()


def start_in_sglang() -> None:
    """Start the plugin for SGLang."""
    if os.environ.get("NANWATCH") == "1":
        import_module("nanwatch.integrations.serving").start_in_sglang()
