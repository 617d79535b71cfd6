"""Comparison of two executions: two models, two traces, or two runs of a script, and the first module that differs.

The runs of models and functions are made here, those of scripts by the command. `trace.diff` compares two traces of one
model, record by record.
"""
