"""Equivalence: whether two executions compute the same, and the first place where they do not.

It makes the runs itself, in this process or in others: a step twice, a model under other switches, two implementations
of a model. What two traces have alike under equal names is compared by the room trace; `traces` matches two engines.
"""
