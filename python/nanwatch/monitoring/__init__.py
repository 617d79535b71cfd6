"""What is seen over many batches: forecasts of overflows, and the log in TensorBoard, W&B or a function."""
