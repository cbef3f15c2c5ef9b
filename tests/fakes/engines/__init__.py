"""Engines, and what answers as one."""
