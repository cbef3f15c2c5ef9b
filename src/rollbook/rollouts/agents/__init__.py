"""Environments of the verifiers library, run by a process of its own environment."""
