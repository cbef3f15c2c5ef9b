"""Tiny models, and their weights by name."""
