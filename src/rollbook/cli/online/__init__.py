"""`rollbook run` and `rollbook rollout`.

In: a CONFIG. Out: parts that run, and their progress on the terminal.
"""
