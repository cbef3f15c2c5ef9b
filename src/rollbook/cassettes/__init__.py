"""Cassettes: agents are answered from recorded trajectories instead of by an engine.

In: trajectories of a store. Out: an HTTP server that gives each known request its recorded reply,
and for an unknown one says which came nearest.
"""
