"""Several ranks: where the first non-finite value was, their reports as one, what replicas hold, and their network.

No collective is called here but by netcheck. Ranks agree through the job's key-value store.
"""
