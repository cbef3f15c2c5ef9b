"""Agents: programs that talk to a proxy, and one that does what none should."""
