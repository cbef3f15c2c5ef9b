"""Algorithms: advantages and losses. Pure."""
