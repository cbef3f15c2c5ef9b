"""Maintenance jobs over a whole store.

In: a store, and a rule or a name. Out: sealed, merged, retained, erased, uploaded or verified
files, and a report.
"""
