"""Modules that compute in float32 while all around them is narrower, and casts inside nested values.

This room changes how a model computes, on request. Watching a model never does.
"""
