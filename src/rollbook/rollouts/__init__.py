"""Agents started, watched and scored.

In: tasks, and a CONFIG that says what is run for each. Out: launches, ends and rewards, told to a proxy over
HTTP alone.
"""
