"""Checkpoints on disk.

In: a policy's tensors, whole or in the pieces of ranks. Out: Hugging Face folders with digests, the optimizer
beside them, and exports for others.
"""
