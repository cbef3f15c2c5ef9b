"""Training: materializes samples, computes losses, takes Megatron steps, writes checkpoints, syncs
engines.
"""
