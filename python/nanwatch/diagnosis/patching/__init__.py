"""Changes of the source as cures: which to propose, how each runs in a function's place, and the patch that it is."""

from __future__ import annotations
