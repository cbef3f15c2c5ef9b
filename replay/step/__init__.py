"""One optimizer step, run again.

In: the log, and a step's number. Out: a verdict, stage by stage, down to the first part that differs.
"""
