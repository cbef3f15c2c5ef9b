"""What a step's manifest says that follows from the log.

In: the log, and the manifest. Out: for each claim (the training, its choice of samples, schedule, weights
that were sent and written) whether it is so.
"""
