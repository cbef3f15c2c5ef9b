"""From the log to batches: samples, recipe, sources."""
