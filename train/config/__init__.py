"""The configuration of a training, and the part of it that identifies a phase."""
