"""Which trajectories may begin, so that those in training are never too old and none need be thrown away."""
