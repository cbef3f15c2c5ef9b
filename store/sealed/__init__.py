"""Closed segments as immutable Parquet.

In: a lane's segments. Out: units, with files derived for queries, on this disk or in object storage, kept
while anybody reads them.
"""
