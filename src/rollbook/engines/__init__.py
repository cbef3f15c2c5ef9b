"""Engines: ids in, ids out, and which policy version made each."""
