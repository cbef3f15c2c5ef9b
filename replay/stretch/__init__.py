"""Many steps of a training.

In: two versions of a policy. Out: the steps between them proven from checkpoint to checkpoint, the first bad
one, and weights that no checkpoint has.
"""
