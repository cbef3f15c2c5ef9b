"""Scripted engines and servers, and a second ledger: for tests and benchmarks, in projects of users too."""

from rollbook.testing.ledger import fold_ledger

__all__ = ["fold_ledger"]
