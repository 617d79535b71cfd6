"""Equivalence: whether two executions compute the same, and the first place where they do not.

It makes the runs itself, in this process or in others: a step twice, a model under other settings, two implementations
of a model. Two traces of the same model are compared in `trace`; here `traces.py` matches those of two implementations.
"""
