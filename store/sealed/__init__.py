"""Closed segments as immutable Parquet: sealing, compaction, derived tables, retention, erasure."""
