"""Agents started, watched and scored: `rollbook rollout`. What it tells the log goes through the proxy."""
