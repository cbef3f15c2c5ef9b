"""Samples to weights: materialization, losses, the Megatron step, checkpoints, engines' weights."""
