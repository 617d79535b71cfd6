"""Facts that take many batches: forecasts of overflows, suspect weights, and the log in TensorBoard, W&B or a function.

What happens at a failure is in `session` and `diagnosis`.
"""
