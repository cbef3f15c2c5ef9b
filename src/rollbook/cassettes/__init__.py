"""Cassettes: an agent is answered from recorded trajectories instead of by an engine."""
