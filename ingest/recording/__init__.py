"""Turns become events, and events turns again.

In: calls, and what engines answered. Out: durable events in one lane; after a restart, the trajectories that
they tell of.
"""
