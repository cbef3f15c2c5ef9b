"""Checks what a step's manifest says against the log that it follows from.

In: the log, and the manifest. Out: for each claim (the training, its choice of samples, schedule,
weights that were sent and written) whether it holds.
"""
