"""Iceberg tables over sealed units, for other engines.

In: the current units of a store. Out: tables in the catalog's database that name their files where they lie;
nothing is copied.
"""
