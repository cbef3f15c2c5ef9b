"""What agents and models said, for people to read: recorded messages as parts, trajectories as facts.

In: the events of a trajectory. Out: frozen values that a terminal and a page show in their own ways.
"""
