"""`rollbook run` and `rollbook rollout`.

In: a CONFIG. Out: parts that run, and how they go on the terminal.
"""
