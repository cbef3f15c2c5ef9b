"""`rollbook serve`: the parts of a proxy put together and run.

In: settings, a store, a model or an upstream. Out: one port that records what agents send, and a child that
seals the log.
"""
