"""Admission: which trajectories may begin, so that none becomes too old to be trained on."""
