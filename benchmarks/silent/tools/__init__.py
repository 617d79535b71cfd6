"""Adapters, one file a tool: `protocol.py` says what one has."""
