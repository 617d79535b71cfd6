"""Several ranks: agreeing where the first non-finite value was, and merging their reports.

No collective is called here. Ranks agree through the job's key-value store.
"""
