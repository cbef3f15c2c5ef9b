"""Folds of events into state.

In: events in their order. Out: trajectories, ownership, versions, a training's history, what is too stale:
values, without I/O. Pure.
"""
