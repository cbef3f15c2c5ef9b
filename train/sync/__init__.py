"""Weight syncs.

In: a policy's tensors. Out: engines that hold them, verified by the engines' own checksums.
"""
