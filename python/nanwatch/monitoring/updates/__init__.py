"""The audit of a step: whether weights moved, were meant to, and moved by what the optimizer's rule gives."""
