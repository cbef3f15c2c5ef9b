"""The configuration of a training, and what of it makes a phase."""
