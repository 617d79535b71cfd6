"""Sinks: receivers of what a Watch finds, such as TensorBoard, W&B, Prometheus, a webhook or a file."""
