"""Equivalence: whether two executions compute the same, bit for bit, and the first place where they do not."""
