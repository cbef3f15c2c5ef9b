"""What is wrong with a training, or would be.

In: its log, or a configuration before it starts. Out: named signs and checks, each with its evidence and
remedy.
"""
