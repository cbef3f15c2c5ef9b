"""Which trajectories may begin, so that none becomes too old to be trained on.

In: what trajectories ask to begin, and the log of the training that uses them. Out: leave at once, or a wait
until the training has room.
"""
