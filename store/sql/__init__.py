"""SQL over the log: DuckDB views and their documentation."""
