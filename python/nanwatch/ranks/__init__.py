"""Several ranks: where the first non-finite value was, their reports as one, what replicas hold, and how they agree.

No collective is called here. Ranks agree through the job's key-value store.
"""
