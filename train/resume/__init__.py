"""Resumes a training.

In: the log, and its checkpoints. Out: the state after the newest step, from the nearest
checkpoint and a rerun of the committed steps after it, compared with what was recorded.
"""
