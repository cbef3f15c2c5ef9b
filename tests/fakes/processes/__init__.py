"""Processes that tests start: forks of a warm one, nodes of Ray, containers, whole runs."""
