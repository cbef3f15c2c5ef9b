"""The configuration of a training.

In: TOML and `--set`. Out: typed, frozen settings, and the digest of the part that names the training.
"""
