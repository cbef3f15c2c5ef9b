"""`rollbook lineage`: where things of the log come from, and what they led to."""
