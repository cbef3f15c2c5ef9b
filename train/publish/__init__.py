"""Publishes a policy's versions.

In: the weights after a step. Out: checkpoints in the store, and engines that serve the version.
"""
