"""Many steps of a training.

In: two versions of a policy. Out: the steps between them proven from checkpoint to checkpoint, the
first bad one, and the weights of versions that have no checkpoint.
"""
