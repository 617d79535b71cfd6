"""Modules that compute in float32 while all around them is narrower, and casts inside nested values.

This room changes how a model computes, on the user's request. Nothing that watches a model does.
"""
