"""Folders that tests name, so that no test computes them from its own place."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
SCRIPTS = TESTS / "support" / "scripts"
CUDA_HOST = TESTS / "native" / "cuda_host"
