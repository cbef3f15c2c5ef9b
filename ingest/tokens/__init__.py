"""Exact ids: chat template, bridge, tree of turns, and how messages are matched."""
