"""Folds of events into what they mean: trajectories, ownership, versions, what was consumed. Pure."""
