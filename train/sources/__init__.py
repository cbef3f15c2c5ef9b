"""Makes batches from the log: samples, recipe, sources."""
