"""Scripted engines and servers, and a second ledger: for tests and benchmarks, in projects of users too.

It imports nothing: pytest loads the plugin of cassettes from here in every run.
"""
