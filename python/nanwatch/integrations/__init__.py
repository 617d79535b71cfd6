"""nanwatch inside the trainers and trackers of other libraries, one file each.

Nothing of theirs is imported before it is asked for.

debug_option.py    the class behind `--debug underflow_overflow` of transformers' Trainer
transformers.py    NanWatchCallback for transformers' Trainer
lightning.py       NanWatchCallback for Lightning's Trainer
tensorboard.py     a log in TensorBoard's event files
wandb.py           a log in a run of Weights & Biases
"""
