"""`watch()`: its options, the Watch, and what it does at a failure, before a step and at the end.

The rooms below do the work. This one decides when, and alone raises a NonFiniteError. In the order of a run: `api.py`
has `watch` and its options, `kinds.py` their values, `watch.py` the parts of a Watch, `failure_handler.py` a failure
from seen to raised, `optimizer_steps.py` a backward until its step, and `reports.py` the origin and the Report.
"""
