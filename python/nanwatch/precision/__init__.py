"""Modules that compute in float32 while all around them is narrower, and casts inside nested values."""
