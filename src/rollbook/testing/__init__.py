"""Scripted engines and models' servers, for tests and benchmarks, here and in projects of users."""
