"""Which weights an engine holds: digests, checksums, layouts and names of versions."""
