"""Audit of an optimizer's steps: whether each did what was meant."""
