"""`watch()`: its options, the Watch, and what it does at a failure, before a step and at the end.

The rooms below do the work. This one decides when, and is the only one that raises a NonFiniteError. In the order of a
run: `api.py` has `watch`, `options.py` its options, `watch.py` the parts of a Watch and the way of each event,
`failure_handler.py` a failure from seen to raised, `optimizer_steps.py` a backward until its step is taken, and
`reports.py` the search for the origin and the Report. `model_finder.py` finds models where nobody calls `watch`.
"""
