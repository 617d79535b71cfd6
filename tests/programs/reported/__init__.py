"""Failing models rebuilt from public reports. Their code is our own."""
