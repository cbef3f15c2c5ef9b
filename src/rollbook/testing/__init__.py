"""Scripted engines and servers, and a second ledger: for tests and benchmarks, in projects of users too."""
