"""nanwatch inside the trainers of other libraries, one file each; nothing of theirs is imported before it is asked for.

debug_option.py    the class behind `--debug underflow_overflow` of transformers' Trainer
transformers.py    NanWatchCallback for transformers' Trainer
lightning.py       NanWatchCallback for Lightning's Trainer
"""
