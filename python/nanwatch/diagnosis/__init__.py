"""After a failure: the batch run again, the operation and line found, cures tried, the results written.

This room may be slow. It starts once a batch has failed and never before.
"""
