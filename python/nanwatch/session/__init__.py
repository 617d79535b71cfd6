"""`watch()`: its options, the Watch, and what it does at a failure, before a step and at the end.

The rooms below do the work. This one decides when, and is the only one that raises a NonFiniteError. In the order of a
run: `api.py` has `watch` and its `options.py`, `watch.py` what is attached and where each event goes,
`failure_handler.py` a failure from seen to raised, `optimizer_steps.py` a backward until its step is taken, and
`reports.py` what a report says. `model_finder.py` finds the models of a program that calls no `watch`.
"""
