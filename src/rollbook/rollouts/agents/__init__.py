"""Kinds of agents that are not plain programs: Python classes, environments of gymnasium, OpenEnv and
verifiers, Harbor's tasks, services.

In: a task, and the address of a proxy. Out: an episode that was played, and its reward.
"""
