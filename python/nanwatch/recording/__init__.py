"""From the calls of modules to frames: walking arguments, observing tensors, the recorder and its pure-Python twin.

How a call reaches a recorder is in `instrumentation`. What a failure leads to is in `session`.
"""
