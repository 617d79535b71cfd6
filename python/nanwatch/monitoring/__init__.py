"""Facts that take many batches: forecasts of overflows, and the log in TensorBoard, W&B or a function.

What happens at a failure is in `session` and `diagnosis`.
"""
