"""SQL over the log.

In: a store and a cut. Out: a DuckDB connection with the views of docs/sql.md, which can reach
nothing else.
"""
