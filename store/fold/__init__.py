"""Folds of events into state: trajectories, ownership, policy versions, training history. Pure."""
