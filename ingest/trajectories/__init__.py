"""Trajectories that are open here.

In: what a request says of itself. Out: the trajectory that it belongs to, with its turns, rewards and
launches.
"""
