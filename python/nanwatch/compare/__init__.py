"""Comparison of two models, or of two runs of a script: the first module that differs. `trace.diff` compares traces."""
