"""Modules that compute in float32 while all around them is narrower, linear layers in narrower formats, and casts.

This room changes how a model computes, on request. Watching a model never does.
"""
