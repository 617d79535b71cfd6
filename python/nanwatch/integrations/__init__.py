"""nanwatch inside the trainers of other libraries, one file each, and the DebugUnderflowOverflow drop-in.

Nothing of theirs is imported before it is asked for. TensorBoard and W&B are in `sinks`.
"""
