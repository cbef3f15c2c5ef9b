"""How stale a sample may be, and how many samples a training will use. Pure."""
