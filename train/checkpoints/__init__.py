"""Checkpoints and tensor files on disk."""
