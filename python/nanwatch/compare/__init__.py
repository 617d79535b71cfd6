"""Comparison of two executions: two models, two traces, or two runs of a script, and the first module that differs.

`trace.diff` compares two traces of one model, record by record.
"""
