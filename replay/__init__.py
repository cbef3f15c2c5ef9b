"""Replay: reruns past steps from the log, and compares every stage with what was recorded."""
