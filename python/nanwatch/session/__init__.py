"""`watch()`: its options, the Watch, and what it does at a failure, before a step and at the end.

The rooms below do the work. This one decides when, and is the only one that raises a NonFiniteError.
"""
