"""Folds of events into state. Pure.

In: events in their order. Out, as values and without I/O: trajectories, ownership, versions, the
history of a training, and which groups are too stale.
"""
