"""A training goes on.

In: the log, and its checkpoints. Out: the state after the newest step, by the nearest checkpoint and
committed steps that run again, compared with what was recorded.
"""
