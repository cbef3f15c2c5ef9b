"""Upstreams of a proxy that only records, and what they reply."""
