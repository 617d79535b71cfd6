"""All frames of a run as a Parquet file: writing it while the run lasts, reading it, comparing two of them.

The ring of the latest frames is in `recording`. Forecasts and logs are made in `history` and `sinks`.
"""
