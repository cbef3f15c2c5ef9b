"""A training from its first step to its last: `loop` says in order what happens.

In: a configuration and a source of samples. Out: committed steps, evaluations, published versions.
"""
