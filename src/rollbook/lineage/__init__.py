"""Where things come from, and all that they led to.

In: the log, and a token, sample, trajectory, step or version. Out: frozen records that print as JSON.
"""
