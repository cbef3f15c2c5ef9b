"""Recorded trajectories, sampled again.

In: a trajectory, and an engine with the same or other weights. Out: a new trajectory of split `replay`, and
where it parts from the recorded one.
"""
