"""Trajectories that are open here: whose a request is, and where its turn stands."""
