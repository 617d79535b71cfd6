"""All frames of a run as a Parquet file: writing it while the run lasts, reading it, comparing two of them.

The ring of the latest frames is in `recording`. What is learnt over batches while a run lasts is in `monitoring`.
"""
