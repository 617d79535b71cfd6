"""Facts that take many batches: forecasts, spikes of the loss, suspect weights, and the log in a tracker.

What happens at a failure is in `session` and `diagnosis`.
"""
