"""All frames of a run as a Parquet file: writing it while the run lasts, reading it, comparing two of them."""
