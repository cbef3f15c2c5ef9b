"""Which trajectories may begin, so that none becomes too old to be trained on.

In: trajectories that ask to begin, and the log of the training that uses them. Out: permission at
once, or a wait until the training has room.
"""
