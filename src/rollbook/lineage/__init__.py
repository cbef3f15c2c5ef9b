"""Where tokens, samples, steps and versions come from, and all that they led to."""
